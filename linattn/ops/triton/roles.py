"""Gradient of one kind of query or key of a chunk that one scaling serves, and sums of a decay's gradient: the parts of gradients.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linattn.ops.triton.sides import rows_of
from linattn.ops.triton.tiles import CHANNEL, HEAD, orders, sums, weight


class Shape(NamedTuple):
    """Constants."""

    K: Any
    V: Any
    C: Any
    BK: Any
    BV: Any
    DECAY: Any
    RULE: Any
    BEFORE: Any
    BITS: Any
    PRECISION: Any
    kind: Any
    DDECAY: Any


class Chunk(NamedTuple):
    """A chunk in a block of channels."""

    rows: Any  # 0 to C - 1
    time: Any  # its tokens
    valid: Any
    channels: Any
    inside: Any
    steps: Any  # decay of each token in binary orders
    total: Any  # their sums, with a decay per head
    x: Any  # binary orders from the middle, with a decay per channel
    decay_at: Any


class Role(NamedTuple):
    """Cotangents and vectors of a kind of query or key, and their strides of time."""

    cotangent: Any  # of a key: its values
    cotangent_token: Any
    vector: Any
    vector_token: Any


@triton.jit
def of_tokens(tensor, time, token, channels, inside):
    """Load a block [C, BK] of a tensor that points to its head."""
    return tl.load(tensor + time[:, None] * token + channels[None, :], mask=inside, other=0.0)


@triton.jit
def factor(x, decay_at, inside, READS: tl.constexpr, BEFORE: tl.constexpr):
    """Factor that scales a kind of query (``READS``) or key [C, BK] to the middle of the chunk, ``x`` binary orders away."""
    if BEFORE:
        x -= orders(tl.load(decay_at, mask=inside, other=0.0))
    return tl.exp2(x if READS else -x)


@triton.jit
def other_side(g, of, reader, scale, chunk, shape: tl.constexpr, READS: tl.constexpr, APART: tl.constexpr):
    """Load the other side of the products of a kind of query (``READS``) or key: weights [C, C], and vectors, unscaled and scaled.

    ``reader`` are the decays before queries; queries that are ``APART`` read before their own token's decay.
    """
    BITS: tl.constexpr = shape.BITS
    kind: tl.constexpr = shape.kind
    i = chunk.rows[:, None]
    t = chunk.rows[None, :]
    raw = of_tokens(of.vector, chunk.time, of.vector_token, chunk.channels, chunk.inside).to(kind)
    vectors = raw
    if shape.DECAY == CHANNEL:
        vectors = (raw * factor(chunk.x, chunk.decay_at, chunk.inside, not READS, APART and not READS)).to(kind)
    if shape.DECAY == HEAD:
        between = reader[:, None] - chunk.total[None, :] if READS else reader[None, :] - chunk.total[:, None]
        g *= weight(between, BITS)
    return tl.where(i > t if READS else i < t, g * scale, 0.0).to(kind), raw, vectors


@triton.jit
def role(
    mine, one, two, scales, state, edge, chunk, shape: tl.constexpr,
    READS: tl.constexpr, TWO: tl.constexpr, BEFORE: tl.constexpr, APART_ONE: tl.constexpr, APART_TWO: tl.constexpr,
):  # fmt: skip
    """Gradient of one kind of query (``READS``) or key [C, BK], its two parts of the decay's gradient, and a token's product with itself.

    ``mine`` is multiplied with ``one`` and, if ``TWO``, ``two``, and with ``state``, that before the chunk (the cotangent of that after
    it), which ``edge`` brings to the middle; ``scales`` are those of the state, of ``one`` and of ``two``.
    Queries may read ``BEFORE`` their token's decay. Then neighbours have no decay between them (``APART``) and are added separately,
    so that the decay's gradient contains none of their rounding errors. Both ends of a pair are rounded equally here and on its other
    side, because their shared part must cancel in the decay's gradient.
    """
    K: tl.constexpr = shape.K
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    BK: tl.constexpr = shape.BK
    BV: tl.constexpr = shape.BV
    DECAY: tl.constexpr = shape.DECAY
    BITS: tl.constexpr = shape.BITS
    PRECISION: tl.constexpr = shape.PRECISION
    kind: tl.constexpr = shape.kind
    rows, time, valid, channels, inside, steps, total, x, decay_at = chunk
    scale, scale_one, scale_two = scales
    i = rows[:, None]
    t = rows[None, :]
    d = tl.zeros([C, BK], tl.float32)
    g_one = tl.zeros([C, C], tl.float32)
    g_two = tl.zeros([C, C], tl.float32)
    for block in range(0, V, BV):
        columns = block + tl.arange(0, BV)
        there = (channels < K)[:, None] & (columns < V)[None, :]
        s = tl.load(state + channels[:, None] * V + columns[None, :], mask=there, other=0.0)
        o = rows_of(mine.cotangent, time, mine.cotangent_token, V, block, valid, BV, kind)
        d = tl.dot(o, tl.trans(s), d, input_precision=PRECISION)
        g_one = tl.dot(
            o, tl.trans(rows_of(one.cotangent, time, one.cotangent_token, V, block, valid, BV, kind)), g_one, input_precision=PRECISION
        )
        if TWO:
            g_two = tl.dot(
                o, tl.trans(rows_of(two.cotangent, time, two.cotangent_token, V, block, valid, BV, kind)), g_two, input_precision=PRECISION
            )
    same_one = tl.sum(tl.where(i == t, g_one, 0.0), 1)
    same_two = tl.sum(tl.where(i == t, g_two, 0.0), 1)

    reader_one = total - steps if (BEFORE if READS else APART_ONE) else total
    reader_two = total - steps if (BEFORE if READS else APART_TWO) else total
    low_one, raw_one, vectors_one = other_side(g_one, one, reader_one, scale_one, chunk, shape, READS, APART_ONE)
    vector = of_tokens(mine.vector, time, mine.vector_token, channels, inside).to(kind)
    scaled = vector
    d *= scale
    if DECAY == CHANNEL:
        own = factor(x, decay_at, inside, READS, BEFORE)
        d *= own * edge[None, :]
        scaled = (vector * own).to(kind)
    if DECAY == HEAD:
        d *= weight(reader_one if READS else tl.sum(steps, 0) - total, BITS)[:, None]
    outside = vector * d
    neighbours = (i == t + 1) if READS else (i == t - 1)
    if APART_ONE:
        d = tl.dot(tl.where(neighbours, low_one, 0.0).to(kind), raw_one, d, input_precision=PRECISION)
        low_one = tl.where(neighbours, 0.0, low_one).to(kind)
    part = tl.dot(low_one, vectors_one, input_precision=PRECISION)
    if TWO:
        low_two, raw_two, vectors_two = other_side(g_two, two, reader_two, scale_two, chunk, shape, READS, APART_TWO)
        if APART_TWO:
            d = tl.dot(tl.where(neighbours, low_two, 0.0).to(kind), raw_two, d, input_precision=PRECISION)
            low_two = tl.where(neighbours, 0.0, low_two).to(kind)
        part = tl.dot(low_two, vectors_two, part, input_precision=PRECISION)
    within = scaled * part
    if DECAY == CHANNEL:
        part *= own
    return d + part, outside, within, same_one, same_two


@triton.jit
def summed(a, rows, LATER: tl.constexpr, OWN: tl.constexpr, DECAY: tl.constexpr, kind: tl.constexpr):
    """Part of the decay's gradient: for each token the sum of rows of ``a`` [C, BK] at ``LATER`` or earlier tokens, with its ``OWN``.

    Exact to float32, because shared summands of the parts must cancel. With a decay per head, of the sums over channels.
    """
    i = rows[:, None]
    t = rows[None, :]
    which = i <= t if OWN else i < t
    if not LATER:
        which = i >= t if OWN else i > t
    if DECAY == HEAD:
        each = tl.sum(a, 1)
        if LATER and OWN:
            total = tl.cumsum(each, 0, reverse=True)
        else:  # not by a difference, which would contain the rounding errors of large summands
            total = tl.sum(tl.where(which, each[None, :], 0.0), 1)
    else:
        if kind == tl.float32:
            total = sums(which, a, kind)
        else:
            high = a.to(tl.bfloat16).to(tl.float32)
            total = sums(which, a - high, kind)
            total = tl.dot(which.to(tl.bfloat16), high.to(tl.bfloat16), total)
    return total
