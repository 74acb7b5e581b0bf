"""Gradients of one kind of query or key of a chunk from all its pairs, combined in unsettled.py."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.tiles import from_middle, pairs, pairs_of_keys, scale_of, settles, sums


@triton.jit
def rows_of(tensor, time, token, size, block, valid, BV: tl.constexpr, kind: tl.constexpr):
    """Load a block of values or cotangents [C, BV]."""
    columns = block + tl.arange(0, BV)
    return tl.load(tensor + time[:, None] * token + columns[None, :], mask=valid[:, None] & (columns < size)[None, :], other=0.0).to(kind)


@triton.jit
def meeting(
    x, steps, meet, settled, g_one, g_two, vector_one, vector_two,
    READS: tl.constexpr, TWO: tl.constexpr, BEFORE: tl.constexpr, BEFORE_ONE: tl.constexpr, BEFORE_TWO: tl.constexpr,
    PRECISION: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Sum that ``vector`` receives from the pairs that ``meet`` in the middle of blocks, ``x`` orders away, and its own scale.

    Both ends of a pair are rounded equally here and on its other side, because their shared part must cancel in the decay's gradient.
    """
    own = scale_of(x - steps if BEFORE else x, settled, READS, kind)
    one = scale_of(x - steps if BEFORE_ONE else x, settled, not READS, kind)
    part = tl.dot(tl.where(meet, g_one, 0.0).to(kind), (vector_one * one).to(kind), input_precision=PRECISION)
    if TWO:
        two = scale_of(x - steps if BEFORE_TWO else x, settled, not READS, kind)
        part = tl.dot(tl.where(meet, g_two, 0.0).to(kind), (vector_two * two).to(kind), part, input_precision=PRECISION)
    return part, own


@triton.jit
def side(
    own, own_token, one, one_token, two, two_token, state, vector, vector_one, vector_two,
    steps, rows, time, valid, channels, scale, scale_one, scale_two,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    READS: tl.constexpr, TWO: tl.constexpr, BEFORE: tl.constexpr, BEFORE_ONE: tl.constexpr, BEFORE_TWO: tl.constexpr,
    DDECAY: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Gradient of one kind of query (``READS``) or key in a block of channels, and its two parts of the decay's gradient.

    ``own`` [C, V] are its cotangents (a key's values), ``one`` and ``two`` the values (cotangents) of the kinds of keys
    (queries) that it meets, ``vector_one`` and ``vector_two`` [C, BK] those themselves, ``state`` the one before the chunk
    (the cotangent of the one after it). ``BEFORE`` says which queries read before their token's decay.
    """
    d = tl.zeros([C, BK], tl.float32)
    g_one = tl.zeros([C, C], tl.float32)
    g_two = tl.zeros([C, C], tl.float32)
    for block in range(0, V, BV):
        columns = block + tl.arange(0, BV)
        inside = (channels < K)[None, :] & (columns < V)[:, None]
        o = rows_of(own, time, own_token, V, block, valid, BV, kind)
        s = tl.load(state + channels[None, :] * V + columns[:, None], mask=inside, other=0.0)  # [BV, BK]
        d = tl.dot(o, s, d, input_precision=PRECISION)
        g_one = tl.dot(o, tl.trans(rows_of(one, time, one_token, V, block, valid, BV, kind)), g_one, input_precision=PRECISION)
        if TWO:
            g_two = tl.dot(o, tl.trans(rows_of(two, time, two_token, V, block, valid, BV, kind)), g_two, input_precision=PRECISION)
    d *= scale
    g_one *= scale_one
    g_two *= scale_two
    i = rows[:, None]
    t = rows[None, :]
    if READS:
        d *= tl.exp2(sums(i > t if BEFORE else i >= t, steps, kind))
    else:
        d *= tl.exp2(sums(i < t, steps, kind))
    outside = vector * d

    # Queries that read before their decay have no decay to the previous token: that pair is added separately, so that the decay's
    # gradient contains no rounding error of it.
    neighbours = (i == t + 1) if READS else (i == t - 1)
    if BEFORE if READS else BEFORE_ONE:
        d = tl.dot(tl.where(neighbours, g_one, 0.0).to(kind), vector_one, d, input_precision=PRECISION)
        g_one = tl.where(neighbours, 0.0, g_one)
    if TWO and (BEFORE if READS else BEFORE_TWO):
        d = tl.dot(tl.where(neighbours, g_two, 0.0).to(kind), vector_two, d, input_precision=PRECISION)
        g_two = tl.where(neighbours, 0.0, g_two)

    low_one = g_one.to(kind)
    low_two = g_two.to(kind)
    inside_chunk = tl.zeros([C, BK], tl.float32)
    done = tl.zeros([C], tl.int32)
    m = C // 2
    while m >= 1:
        x = from_middle(steps, rows, m, kind)
        settled = settles(x, rows, m, done, kind)
        meet = pairs(rows, m, settled, done) if READS else pairs_of_keys(rows, m, settled, done)
        part, scaled = meeting(
            x, steps, meet, settled, low_one, low_two, vector_one, vector_two, READS, TWO, BEFORE, BEFORE_ONE, BEFORE_TWO,
            PRECISION, kind,
        )  # fmt: skip
        if DDECAY:  # triton 3.6 does not compile the loop with a sum that nobody uses
            inside_chunk += (vector * scaled).to(kind) * part
        d += part * scaled
        done += settled.to(tl.int32)
        m = tl.where(tl.min(done, 0) > 0, 0, m // 2)
    return d, outside, inside_chunk
