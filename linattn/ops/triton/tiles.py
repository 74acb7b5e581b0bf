"""Helpers of all kernels: the position of a program in the sequences, exact sums of decays, and the blocks in which pairs of tokens meet.

A weight between two tokens depends only on the decays between them, however strong earlier ones are. Decays per head are
summed as whole numbers of 2^-bits binary orders: differences of such sums are exact. Decays per channel are summed by products
with 0/1 matrices that select the tokens in between. -inf becomes a step of 160 binary orders, by which every weight becomes 0.

With a decay per channel both sides of a product are scaled before it is formed. Most chunks need one or two products, see anchors.py.
In others, with stronger decays, tokens at least :data:`NEAR` apart are scaled to the middle of the smallest block (of a power of two) that
contains both, by factors of at most 1: a product for each size of blocks. Nearer ones are multiplied element by element.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
RESET = tl.constexpr(-160.0)  # binary orders: float32 ends at 2^-149

NEAR = tl.constexpr(8)  # distance of tokens from which on they are paired by products where decays are strong

NONE = tl.constexpr(0)
HEAD = tl.constexpr(1)
CHANNEL = tl.constexpr(2)

PLAIN = tl.constexpr(0)
DELTA = tl.constexpr(1)
ERASE = tl.constexpr(2)


@triton.jit
def locate(slot, cu, sequences, tokens, length, PACKED: tl.constexpr):
    """Sequence, first and last token (exclusive), and place in its sequence of the ``slot``-th piece of ``length`` tokens.

    Sequence n of a packed row, which begins at token c, has its pieces from slot c // length + n on, found by a search. Each sequence
    has at most one empty slot, whose first token is its last.
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
    """Slot of the first piece of sequence ``n``, which begins at token ``begin``."""
    if PACKED:
        slot = begin // length + n
    else:
        slot = n * ((tokens + length - 1) // length)
    return slot


@triton.jit
def chunk_slots(sequences, tokens, C: tl.constexpr, PACKED: tl.constexpr):
    """Number of slots of chunks of all sequences."""
    if PACKED:
        slots = tokens // C + sequences
    else:
        slots = sequences * ((tokens + C - 1) // C)
    return slots


@triton.jit
def is_left(item, done, items, K: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr):
    """True for each of the ``items`` [N] that is not ``done``.

    An item is a block of BK channels of a chunk and head; ``done`` [chunks, H, units] has its units of channels.
    """
    COLUMNS: tl.constexpr = (K + BK - 1) // BK
    COUNT: tl.constexpr = (K + UNIT - 1) // UNIT
    unit = (item % COLUMNS)[:, None] * (BK // UNIT) + tl.arange(0, BK // UNIT)[None, :]
    at = (item // COLUMNS).to(tl.int64)[:, None] * COUNT + unit
    return tl.min(tl.load(done + at, mask=(item < items)[:, None] & (unit < COUNT), other=1), 1) == 0


@triton.jit
def first_left(done, items, K: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr):
    """First item of this program that is not ``done``; ``items`` if there is none. Programs take turns."""
    item = tl.program_id(0)
    found = items
    while item < items:
        ahead = item + tl.arange(0, 32) * tl.num_programs(0)
        found = tl.min(tl.where(is_left(ahead, done, items, K, BK, UNIT), ahead, items), 0)
        item = tl.where(found < items, items, item + 32 * tl.num_programs(0))
    return found


@triton.jit
def whole(decay, BITS: tl.constexpr):
    """Natural logarithms as whole numbers of 2^-BITS binary orders; 64 bits wide if results must be exact to float32."""
    x = tl.maximum(decay.to(tl.float32) * LOG2E, RESET) * (2.0**BITS) - 0.5  # the conversion cuts towards zero
    if BITS > 20:
        steps = x.to(tl.int64)
    else:
        steps = x.to(tl.int32)
    return steps


@triton.jit
def weight(steps, BITS: tl.constexpr):
    """Factor of a decay by ``steps``, at most 0 unless masked."""
    return tl.exp2(tl.minimum(steps, 0).to(tl.float32) * (2.0**-BITS))


@triton.jit
def orders(decay):
    """Natural logarithms as binary orders, -inf as twice :data:`RESET`: out of the range of any anchor, see anchors.py."""
    return tl.maximum(decay.to(tl.float32) * LOG2E, 2 * RESET, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sums(which, a, kind: tl.constexpr):
    """Sums of the rows of ``a`` [C, BK] by a matrix product with ``which`` [C, C] of -1, 0 and 1.

    Rows of weight 0 do not affect a sum, however strong their decays.
    """
    if kind == tl.float32:
        total = tl.dot(which.to(tl.float32), a, input_precision="tf32x3")
    else:
        pick = which.to(tl.bfloat16)
        high = leading(a)
        total = tl.dot(pick, (a - high).to(tl.bfloat16))
        total = tl.dot(pick, high.to(tl.bfloat16), total)
    return total


@triton.jit
def leading(a):
    """Float32 ``a`` rounded to a number that bfloat16 represents, ties away from zero.

    By whole numbers, because a card converts single numbers to bfloat16 in a slower unit. A NaN may become 0; then what is left of it,
    the difference, is a NaN.
    """
    return ((a.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


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
def distant(rows, m, READS: tl.constexpr):
    """[C, C]: pairs at least :data:`NEAR` tokens apart that meet in the middle of a block of 2m.

    Rows are queries and columns earlier keys (``READS``), or rows keys and columns later queries.
    """
    i = rows[:, None]
    t = rows[None, :]
    apart = i ^ t
    return ((i - t if READS else t - i) >= NEAR) & (apart >= m) & (apart < 2 * m)


@triton.jit
def at_distance(g, rows, distance, READS: tl.constexpr):
    """Elements [C, 1] of ``g`` [C, C] of each query (row) and the key ``distance`` tokens before it (not ``READS``: key, later query)."""
    i = rows[:, None]
    t = rows[None, :]
    return tl.sum(tl.where((i - t if READS else t - i) == distance, g.to(tl.float32), 0.0), 1)[:, None]


@triton.jit
def products_in_parts(left, right, valid, K: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Products [C, C] of two rows of pointers to vectors, in three terms of tf32, loaded again in parts: whole ones would be spilled."""
    a = tl.zeros([C, C], tl.float32)
    for block in range(0, K, 32):
        channels = block + tl.arange(0, 32)
        inside = valid[:, None] & (channels < K)[None, :]
        x = tl.load(left + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(right + channels[None, :], mask=inside, other=0.0).to(tl.float32)
        a = tl.dot(x, tl.trans(y), a, input_precision=PRECISION)
    return a


@triton.jit
def inverse(a, rows, PRECISION: tl.constexpr):
    """(I - a)^-1 of a strictly lower triangular a [C, C], by blocks: the inverse of twice the size from two halves.

    Blocks of up to 16 tokens on the diagonal are computed as a stack of [16, 16].
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
