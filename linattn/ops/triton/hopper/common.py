"""Helpers of all Hopper kernels: tiles of shared memory, descriptors that end with a segment, exact sums of decays."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton import prepare, tiles
from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier

locate = gluon.jit(tiles.locate.fn)
first_slot = gluon.jit(tiles.first_slot.fn)
whole = gluon.jit(tiles.whole.fn)
weight = gluon.jit(tiles.weight.fn)
away_from_zero = gluon.jit(prepare.away_from_zero.fn)

GONE = gl.constexpr(-126.0)  # binary exponent at the lower end of float32's normal numbers
M = gl.constexpr(64)  # rows of a wgmma, and of a warpgroup's part of a transposed state
SHARED = 227 * 1024  # bytes of shared memory that one program can have


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def reach(bounds, step, count, BACK: gl.constexpr, ORDERS: gl.constexpr, GROWS: gl.constexpr, EACH: gl.constexpr):
    """Number of chunks or tokens from the first (``BACK``: from the last back), at most ``count``, through which a state does not vanish.

    ``bounds`` has for each, ``step`` apart, an upper bound of the log factor of a state, in units of ``ORDERS`` binary exponents; a
    thread loads ``EACH`` of them. If some are positive (``GROWS``) a state may be small in between: all are read then. Also returns
    whether the state vanishes through all.
    """
    layout: gl.constexpr = gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0])
    SPAN: gl.constexpr = 32 * EACH * gl.num_warps()
    passed = 0  # as many leave of the state more than nothing
    orders = 0.0
    start = 0
    while start < count:
        n = start + gl.arange(0, SPAN, layout)
        at = count - 1 - n if BACK else n
        x = gl.load(bounds + at.to(gl.int64) * step, mask=n < count, other=0.0).to(gl.float32) * ORDERS
        gone = orders + gl.associative_scan(x, 0, add) <= GONE  # False of a NaN
        passed = gl.maximum(passed, gl.max(gl.where(gone | (n >= count), 0, n + 1), 0))
        orders += gl.sum(x, 0)
        start += SPAN
        if not GROWS:
            start = gl.where(passed < start, count, start)
    return gl.minimum(passed + 1, count), passed < count


@gluon.jit
def described(base, rows, stride, WIDTH: gl.constexpr, HEIGHT: gl.constexpr, BLOCK: gl.constexpr):
    """[rows, WIDTH] of bfloat16 at ``base``, in blocks of [HEIGHT, BLOCK]: entries past the end are read as 0 and not written."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, BLOCK], gl.bfloat16)
    return tma.describe(base, [rows, WIDTH], [stride, 1], [HEIGHT, BLOCK], layout)


@gluon.jit
def buffer(n: gl.constexpr, HEIGHT: gl.constexpr, BLOCK: gl.constexpr):
    """Allocate shared memory for ``n`` tiles [HEIGHT, BLOCK] of bfloat16."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, BLOCK], gl.bfloat16)
    return gl.allocate_shared_memory(gl.bfloat16, [n, HEIGHT, BLOCK], layout)


@gluon.jit
def numbers(n: gl.constexpr, SIZE: gl.constexpr, dtype: gl.constexpr):
    """Allocate shared memory for ``n`` vectors."""
    return gl.allocate_shared_memory(dtype, [n, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """``n`` barriers for ``count`` arrivals each. All of them must stay in use until the end of the kernel.

    The compiler reuses the memory of unused barriers, here for the arguments of specialised warps. With another process on the GPU these
    warps sometimes read barriers there: barriers that were not invalidated seem to be written back.
    """
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def give_back(bar, pred=True):
    """Arrive at ``bar`` after loads from shared memory, so that other warps may write there.

    An arrival alone does not wait for pending loads of the other warps: with two processes on the GPU the next TMA load sometimes
    overtook the last of them. The fence waits for them.
    """
    fence_async_shared()
    mbarrier.arrive(bar, count=1, pred=pred)


@gluon.jit
def initial_state(start, channels, columns, width, TURNED: gl.constexpr, K: gl.constexpr):
    """Sᵀ [M, K] in accumulators from [K, width] at ``start``, ``TURNED`` from [width, K]; 0 if there is no ``start``."""
    if start is None:
        return gl.zeros([M, K], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16]))
    else:
        return gl.load(start + (channels[None, :] + columns[:, None] * K if TURNED else channels[None, :] * width + columns[:, None]))


@gluon.jit
def final_state(end, s, channels, columns, width):
    """Store Sᵀ [M, K] as [K, width] at ``end``."""
    width = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [width], gl.int32, False, 1)  # recomputes addresses, to avoid spills
    gl.store(end + channels[None, :] * width + columns[:, None], s)
