"""Operands of products over 64 channels: layouts, tiles in shared memory, and operands in registers or rounded.

Layouts depend on the number of warps of the calling function: one warpgroup has 64 rows of accumulators, two share their columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.names import reinterpret, warpgroup_mma
from linattn.ops.triton.hopper.sizes import CHUNK

C = gl.constexpr(CHUNK)  # tokens of a chunk
BLOCK = gl.constexpr(64)  # channels of a step: a row of the swizzle of shared memory
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [C, C] and [C, BLOCK] in accumulators of a warpgroup
NATURAL_RESET = gl.constexpr(-145.0)  # ln 2^-209, for a reset, as a bfloat16 number: beyond decays.SPAN, but 2^±104.5 are finite numbers


@gluon.constexpr_function
def shares(warps):
    """[C, BLOCK] and [C, C] in accumulators, a part of the columns for each warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 256 // warps, 16])


@gluon.constexpr_function
def copies(warps):
    """[C, C] in the layout of left operands, whole in each warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 64, 16])


@gluon.jit
def add_two(a, b, c, d):
    return a + c, b + d


@gluon.jit
def exp2(x):
    """2^x in one instruction; subnormal results are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def again(x):
    """2^x, recomputed: the compiler cannot reuse an earlier result, which would occupy registers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def pinned(x):
    """Compute ``x`` before the next instructions, because a product that continues with accumulators overwrites the operands of ``x``.

    Otherwise LLVM may move the arithmetic after the start of the product, with negated copies of the accumulators, and ptxas 13.4
    (triton 3.9) coalesces those copies with the accumulators and serialises all products of the kernel.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], gl.float32, False, 1)


@gluon.jit
def left(x):
    """A tile as the left operand of a product, from the registers it is in.

    The registers must be written before the product's wgmma.fence. LLVM ignores the fence and packs pairs right before their use, but
    does not move instructions with declared side effects.
    """
    WARPS: gl.constexpr = gl.num_warps()
    x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x.to(gl.bfloat16)], gl.bfloat16, False, 2)
    return gl.convert_layout(x, gl.DotOperandLayout(0, shares(WARPS), 2), assert_trivial=True)


@gluon.jit
def pick(chosen):
    """A 0/1 matrix as a left operand."""
    return left(gl.where(chosen, 1.0, 0.0))


@gluon.jit
def hold(tile, x):
    """Store ``x``, rounded, in shared memory."""
    tile.store(x.to(gl.bfloat16))


@gluon.jit
def held(tile):
    """Load ``tile`` in the layout of accumulators."""
    WARPS: gl.constexpr = gl.num_warps()
    return tile.load(shares(WARPS)).to(gl.float32)


@gluon.jit
def rounded(x):
    """``x`` in bfloat16, two numbers at a time: by itself the compiler converts numbers that are computed with one by one, more slowly."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, True, 2)


@gluon.jit
def scaled(tile, x, weight):
    """Store ``x`` times ``weight``, rounded, in shared memory for products; returns the stored values."""
    y = rounded(x.to(gl.float32) * weight)
    tile.store(y)
    return y


@gluon.jit
def split(a, high, low):
    """Store ``a`` in shared memory for products, split in two bfloat16 numbers."""
    top = a.to(gl.bfloat16)
    low.store((a - top.to(gl.float32)).to(gl.bfloat16))
    high.store(top)


@gluon.jit
def keep(a, decays, first, ROWS: gl.constexpr):
    """Store ``a`` [ROWS, K] in shared memory for products: truncated to bfloat16, and the remainder if there is a tile for it."""
    high, low = decays
    if low is not None:
        cut = (a.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
        low.slice(first, ROWS).store((a - cut).to(gl.bfloat16))
        a = cut
    high.slice(first, ROWS).store(a.to(gl.bfloat16))


@gluon.jit
def keep_halves(early, late, high, low, at, LOW: gl.constexpr):
    """Store both halves of a tile in the ``at``-th of ``high`` and, with ``LOW``, of ``low``."""
    HALF: gl.constexpr = early.shape[0]
    tiles = (high.index(at), low.index(at) if LOW else None)
    keep(early, tiles, 0, HALF)
    keep(late, tiles, HALF, HALF)


@gluon.jit
def start_sum(picked, high, low, at, LOW: gl.constexpr):
    """Start the sums of the rows of the ``at``-th tile that each row of the left operand ``picked`` selects."""
    WARPS: gl.constexpr = gl.num_warps()
    x = gl.zeros([BLOCK, BLOCK], gl.float32, shares(WARPS))
    if LOW:
        x = warpgroup_mma(picked, low.index(at), x, use_acc=False, is_async=True)
        x = warpgroup_mma(picked, high.index(at), x, is_async=True)
    else:
        x = warpgroup_mma(picked, high.index(at), x, use_acc=False, is_async=True)
    return x


@gluon.jit
def start_products(pairs):
    """Start the sum of the products of ``pairs`` of a left operand and a tile [C, BLOCK]."""
    WARPS: gl.constexpr = gl.num_warps()
    x = gl.zeros([BLOCK, BLOCK], gl.float32, shares(WARPS))
    for n in gl.static_range(len(pairs)):
        x = warpgroup_mma(pairs[n][0], pairs[n][1], x, use_acc=n > 0, is_async=True)
    return x


@gluon.jit
def in_blocks(tile, ROWS: gl.constexpr, K: gl.constexpr):
    """View a tile [ROWS, K] as [K / BLOCK, ROWS, BLOCK], the layout of the swizzle."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK], gl.bfloat16)
    return reinterpret(tile, gl.bfloat16, [K // BLOCK, ROWS, BLOCK], layout)


@gluon.jit
def in_rows(tiles, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """View tiles [n, K, WIDTH], of rows not wider than the swizzle, as [n * K / ROWS, ROWS, WIDTH]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], gl.bfloat16)
    return reinterpret(tiles, gl.bfloat16, [tiles.shape[0] * tiles.shape[1] // ROWS, ROWS, WIDTH], layout)


@gluon.jit
def passing(states, dstates, V: gl.constexpr):
    """[BLOCK, BLOCK] with row sums of ``states`` times their cotangents, both ``in_blocks``, by channel."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [BLOCK // WARPS, WARPS // 2], [WARPS, 1], [1, 0])
    both = gl.zeros([BLOCK, BLOCK], gl.float32, layout)
    for part in gl.static_range(V // BLOCK):
        both += states.index(part).load(layout).to(gl.float32) * dstates.index(part).load(layout).to(gl.float32)
    return both
