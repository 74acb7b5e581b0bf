"""Helpers of all kernels: the position of a program in the sequences, exact sums of decays, and the blocks in which pairs of tokens meet.

A weight between two tokens depends on nothing but the decays between them, however strong the ones before. Decays per head are
summed as whole numbers of 2^-bits binary orders: differences of such sums are exact. Decays per channel are summed by products
with matrices that pick what lies between. -inf becomes a step of 160 binary orders, which no weight survives.

A decay per channel needs both sides of a product scaled before it is formed. Two tokens meet in the middle of the smallest block
(of a power of two) that holds both, and both factors are at most 1: log2(C) sizes of blocks cover all pairs. A block in which no
token is more than ``TAME`` binary orders from the middle needs no smaller ones: all its pairs can meet in its middle, with
factors above 1 on one side that those of the other undo. So weak decays take one product, and strong ones stay exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
RESET = tl.constexpr(-160.0)  # binary orders: float32 ends at 2^-149
TAME = tl.constexpr(40.0)  # binary orders: a factor of 2^-40 beside small gradients is still far from the end of float32

NONE = tl.constexpr(0)
HEAD = tl.constexpr(1)
CHANNEL = tl.constexpr(2)

PLAIN = tl.constexpr(0)
DELTA = tl.constexpr(1)
ERASE = tl.constexpr(2)


@triton.jit
def locate(slot, cu, sequences, tokens, length, PACKED: tl.constexpr):
    """The sequence, first and last token (exclusive), and place in its sequence of the ``slot``-th piece of ``length`` tokens.

    A sequence of a packed row that begins at token c has its pieces from slot c // length + n on: room for all, found by a
    search, with at most one empty slot for each sequence (its first token is then its last).
    """
    if PACKED:
        low = 0
        high = sequences - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = tl.load(cu + middle).to(tl.int32) // length + middle <= slot
            low = tl.where(fits, middle, low)
            high = tl.where(fits, high, middle - 1)
        n = low
        begin = tl.load(cu + n).to(tl.int32)
        stop = tl.load(cu + n + 1).to(tl.int32)
        index = slot - begin // length - n
    else:
        pieces = (tokens + length - 1) // length
        n = slot // pieces
        index = slot - n * pieces
        begin = 0
        stop = tokens
    first = begin + index * length
    last = tl.minimum(first + length, stop)
    if not PACKED:
        first += n * tokens
        last += n * tokens
        begin += n * tokens
        stop += n * tokens
    return n, first, last, index, begin, stop


@triton.jit
def first_slot(n, begin, tokens, length, PACKED: tl.constexpr):
    """The slot of the first piece of sequence ``n``, which begins at token ``begin``."""
    if PACKED:
        slot = begin // length + n
    else:
        slot = n * ((tokens + length - 1) // length)
    return slot


@triton.jit
def whole(decay, BITS: tl.constexpr):
    """Natural logarithms as whole numbers of 2^-BITS binary orders; 64 bits wide where float32 is to be exact."""
    x = tl.maximum(decay.to(tl.float32) * LOG2E, RESET) * (2.0**BITS) - 0.5  # the conversion cuts towards zero
    if BITS > 20:
        steps = x.to(tl.int64)
    else:
        steps = x.to(tl.int32)
    return steps


@triton.jit
def weight(steps, BITS: tl.constexpr):
    """The factor that ``steps`` (at most 0; what is masked may be more) stand for."""
    return tl.exp2(tl.minimum(steps, 0).to(tl.float32) * (2.0**-BITS))


@triton.jit
def orders(decay):
    """Natural logarithms as binary orders, -inf as one that no weight survives."""
    return tl.maximum(decay.to(tl.float32) * LOG2E, RESET, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sums(which, a, kind: tl.constexpr):
    """Sums of the rows of ``a`` [C, BK] by a matrix product with ``which`` [C, C] of -1, 0 and 1.

    What has the weight 0 leaves no trace: a sum between two tokens knows nothing of the others, however strong their decays.
    """
    if kind == tl.float32:
        total = tl.dot(which.to(tl.float32), a, input_precision="tf32x3")
    else:
        pick = which.to(tl.bfloat16)
        high = a.to(tl.bfloat16)
        low = (a - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(pick, low)
        total = tl.dot(pick, high, total)
    return total


@triton.jit
def from_middle(a, rows, m, kind: tl.constexpr):
    """Orders [C, BK] between each token and the middle of its block of 2m: negative after it, positive before."""
    i = rows[:, None]
    t = rows[None, :]
    middle = (i | (2 * m - 1)) - m
    late = (i & m) != 0
    between = (t > tl.minimum(i, middle)) & (t <= tl.maximum(i, middle))
    return sums(tl.where(between, tl.where(late, 1.0, -1.0), 0.0), a, kind)


@triton.jit
def settles(x, rows, m, done):
    """[C]: whether a token's block of 2m is not done yet and needs no smaller blocks, as nothing in it is far from its middle.

    ``x`` [C, BK] are the orders from the middle. Decided for each block alone: what stands before a reset, in another block or
    far off in its own, decides nothing after it.
    """
    far = tl.max(tl.abs(x), 1)
    together = (rows[:, None] ^ rows[None, :]) < 2 * m
    worst = tl.max(tl.where(together, far[None, :], 0.0), 1)
    return (worst <= TAME) & (done == 0)


@triton.jit
def scale_of(x, settled, READS: tl.constexpr):
    """The factors [C, BK] of the side that reads, or of the one that writes, for tokens ``x`` orders from the middle of their block.

    At most 1, or, in a block that settles, each other's inverse, and small enough for either to be one.
    """
    inside = tl.minimum(x, TAME) if READS else tl.minimum(-x, TAME)
    return tl.exp2(tl.where(settled[:, None], inside, -tl.abs(x)))


@triton.jit
def pairs(rows, m, settled, done):
    """[C, C]: the pairs, query i (a row) and earlier key j, that meet in the blocks of 2m: all of a block that settles."""
    apart = rows[:, None] ^ rows[None, :]
    least = tl.where(settled, 1, m)[:, None]
    return (rows[:, None] > rows[None, :]) & (apart < 2 * m) & (apart >= least) & (done == 0)[:, None]


@triton.jit
def pairs_of_keys(rows, m, settled, done):
    """``pairs`` transposed: key j (a row) and later query i."""
    apart = rows[:, None] ^ rows[None, :]
    least = tl.where(settled, 1, m)[:, None]
    return (rows[:, None] < rows[None, :]) & (apart < 2 * m) & (apart >= least) & (done == 0)[:, None]


@triton.jit
def inverse(a, rows, PRECISION: tl.constexpr):
    """(I - a)^-1 of a strictly lower triangular a [C, C], by blocks: the inverse of twice the size from two halves.

    Up to 16 tokens the blocks on the diagonal are all there is, and go as a stack of [16, 16].
    """
    C: tl.constexpr = a.shape[0]
    S: tl.constexpr = 16
    within = tl.arange(0, S)
    near = (within[:, None] ^ within[None, :])[None, :, :]
    on_diagonal = (rows // S)[:, None, None] == tl.arange(0, C // S)[None, :, None]
    stack = tl.reshape(tl.sum(tl.where(on_diagonal, tl.reshape(a, [C, C // S, S]), 0.0), 1), [C // S, S, S])
    t = tl.where(near == 0, 1.0, tl.where(near == 1, stack, 0.0))
    for level in tl.static_range(1, 4):
        below = tl.where((near >= 2**level) & (near < 2 * 2**level), stack, 0.0)
        t += tl.dot(t, tl.dot(below, t, input_precision=PRECISION), input_precision=PRECISION)
    t = tl.reshape(tl.where(on_diagonal, tl.reshape(t, [C, S])[:, None, :], 0.0), [C, C])
    apart = rows[:, None] ^ rows[None, :]
    for level in tl.static_range(4, 7):
        if 2**level < C:
            below = tl.where((apart >= 2**level) & (apart < 2 * 2**level), a, 0.0)
            t += tl.dot(t, tl.dot(below, t, input_precision=PRECISION), input_precision=PRECISION)
    return t
