"""Helpers of the kernels that prepare chunks with a decay per channel: loads to shared memory, sums of decays, stores of tiles.

One program per chunk and head; two or three of them share a multiprocessor and hide each other's latency. Sums of decays are products of a
0/1 matrix with the decays (bfloat16, and the remainder of float32). Tensor cores return them in the register layout of the queries and keys
that they scale, which are then left operands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.common import numbers
from linattn.ops.triton.hopper.decays import SPAN
from linattn.ops.triton.hopper.names import copy_async, copy_commit, fence_async_shared, reinterpret, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import BLOCK, NATURAL_RESET, WIDE, C, add_two, exp2, held, keep, left, pick, start_sum
from linattn.ops.triton.tiles import LOG2E

# Binary orders: a chunk of the delta rule that is scaled to its start has factors of 2^-96 to 2^96, and bfloat16 ends at 2^-126 and 2^128.
WHOLE = gl.constexpr(96.0)


class Chunk(NamedTuple):
    """The chunk of a program: tokens, the first of them, its place among all with the heads, its head, and that of its queries and keys."""

    count: Any
    time: Any
    place: Any
    head: Any
    shared: Any


@gluon.jit
def chunk(call, at):
    """The :class:`Chunk` of a :class:`prepare.Slot`."""
    place = at.slot.to(gl.int64) * call.heads + at.head
    head = at.head.to(gl.int64)
    return Chunk(at.last - at.first, at.first.to(gl.int64), place, head, head // call.group)


@gluon.jit
def room(K: gl.constexpr):
    """Allocate shared memory for [C, K] of bfloat16."""
    return gl.allocate_shared_memory(gl.bfloat16, [C, K], gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16))


@gluon.jit
def copy_rows(tile, start, token, count, K: gl.constexpr):
    """Start to copy rows of a head to shared memory, padded with zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, layout))
    channel = gl.arange(0, K, gl.SliceLayout(0, layout))
    copy_async(tile, start + row[:, None] * (token // 8 * 8) + channel[None, :], mask=(row < count)[:, None])


@gluon.jit
def copy_pair(q_tile, k_tile, call, here, K: gl.constexpr):
    """Start to copy queries and keys."""
    q, k = call.q, call.k
    from_q = q.base + here.time * (q.token // 8 * 8) + here.shared * (q.head // 8 * 8)
    from_k = k.base + here.time * (k.token // 8 * 8) + here.shared * (k.head // 8 * 8)
    copy_rows(q_tile, from_q, q.token, here.count, K)
    copy_rows(k_tile, from_k, k.token, here.count, K)
    copy_commit()


@gluon.jit
def half_of(start, token, first, last, K: gl.constexpr):
    """Natural logarithms [C / 2, K] from row ``first`` on, 0 from row ``last`` on; a reset is a finite number whose weights are 0."""
    layout: gl.constexpr = gl.BlockedLayout([C // 2 * K // 512, 4], [128 // K, K // 4], [4, 1], [1, 0])
    row = first + gl.arange(0, C // 2, gl.SliceLayout(1, layout))
    channel = gl.arange(0, K, gl.SliceLayout(0, layout))
    a = gl.load(start + row[:, None] * (token // 4 * 4) + channel[None, :], mask=(row < last)[:, None], other=0.0)
    return gl.maximum(a.to(gl.float32), NATURAL_RESET)


@gluon.jit
def load_decays(call, tokens, tiles, K: gl.constexpr):
    """Load the decays of both halves of a chunk, also to ``tiles``, high and low (or None), for sums."""
    decay = call.decay
    start = decay.base + tokens.time * (decay.token // 4 * 4) + tokens.head * (decay.head // 4 * 4)
    early = half_of(start, decay.token, 0, tokens.count, K)
    late = half_of(start, decay.token, C // 2, tokens.count, K)
    keep(early, tiles, 0, C // 2)
    keep(late, tiles, C // 2, C // 2)
    fence_async_shared()
    return early, late


@gluon.jit
def numbered(call):
    """Token indices by row and by column."""
    zero = call.heads % call.group  # 0, unknown to the compiler: ptxas materialises constant left operands too late
    i = (gl.arange(0, C, gl.SliceLayout(1, WIDE)) + zero)[:, None]
    return i, gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :]


@gluon.jit
def between(i, middle, t):
    """[C, C]: True for tokens t between token i and the middle of its block: after the earlier, up to the later."""
    return (t > gl.minimum(i, middle)) & (t <= gl.maximum(i, middle))


@gluon.jit
def largest_settled(early, late, of_half):
    """The most tokens, a power of two up to 32, of which all blocks settle; ``of_half``: the orders of the strongest half of a channel.

    A token's pair with itself has no decay, so it is 1 at least, also beside a reset, on whose one side nothing may depend on the other.
    """
    n = C // 2
    if of_half < -SPAN:
        n = gl.maximum(gl.minimum(smallest_far(early), smallest_far(late)) // 2, 1)
    return n


@gluon.jit
def smallest_far(a):
    """The least n, a power of two up to 32, for which n consecutive tokens (from a multiple of n on) do not settle; 32 is not tested."""
    K: gl.constexpr = a.shape[1]
    least = gl.full(a.shape, 32, gl.int32, a.type.layout)
    for n in gl.static_range(5):
        least = gl.where(a < -SPAN / LOG2E, gl.minimum(least, 2**n), least)
        a = gl.sum(gl.reshape(a, [16 >> n, 2, K]), 1)
        least = gl.min(gl.reshape(least, [16 >> n, 2, K]), 1)
    return gl.min(gl.min(least, 0), 0)


@gluon.jit
def summed(chosen, decays, block):
    """Sums [C, BLOCK] of the decays of ``block`` over the tokens that each row of ``chosen`` [C, C] selects."""
    high, low = decays
    return warpgroup_mma_wait(0, deps=[start_sum(pick(chosen), high, low, block, low is not None)])


@gluon.jit
def each(decays, block):
    """The decays [C, BLOCK] themselves, as they are summed."""
    high, low = decays
    a = held(high.index(block))
    if low is not None:
        a += held(low.index(block))
    return a


@gluon.jit
def from_middle(i, t, n, decays, block, BEFORE: gl.constexpr):
    """[C, BLOCK]: sums of decays from where half of the sum over a block of n tokens is reached up to each token, or ``BEFORE`` it."""
    high, low = decays
    signed = gl.where((i ^ t) < n, gl.where(t < i if BEFORE else t <= i, 0.5, -0.5), 0.0)
    return warpgroup_mma_wait(0, deps=[start_sum(left(signed), high, low, block, low is not None)])


@gluon.jit
def save_totals(early, late, call, here, K: gl.constexpr, HALVES: gl.constexpr):
    """Store the decay of a chunk, and of how many tokens its blocks settle: 32 only where ``HALVES``.

    Returns the orders of the chunk, in shared memory by block of channels, then those of the strongest channel: of the chunk and of a half.
    """
    BLOCKS: gl.constexpr = K // BLOCK
    of_early, of_late = gl.reduce((early, late), 0, add_two)
    of_early = of_early * LOG2E
    of_late = of_late * LOG2E
    orders = of_early + of_late
    of_half = gl.minimum(of_early, of_late)
    gl.store(call.fade + here.place * K + gl.arange(0, K, orders.type.layout), exp2(orders))
    tokens = gl.where(orders >= -SPAN, C, gl.where(of_half >= -SPAN, C // 2, 0) if HALVES else 0)
    tokens = gl.min(gl.reshape(tokens, [BLOCKS, BLOCK]), 1)
    gl.store(call.settled + here.place * BLOCKS + gl.arange(0, BLOCKS, tokens.type.layout), tokens)
    totals = numbers(1, K, gl.float32)
    totals.index(0).store(orders)
    by_block = reinterpret(totals, gl.float32, [BLOCKS, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return by_block, gl.min(orders, 0), gl.min(of_half, 0)


@gluon.jit
def write_out(to, tile, WIDTH: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    row = gl.arange(0, C, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    gl.store(to + row[:, None] * WIDTH + column[None, :], tile.load(layout))


@gluon.jit
def reciprocal(x):
    """1 / x in one instruction, so that the exponents of ``x`` need no registers."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)
