"""Gradients of one kind of query or key of a chunk from all its pairs where decays are strong, combined in unsettled.py."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.roles import of_tokens, rows_of
from linattn.ops.triton.tiles import NEAR, at_distance, distant, from_middle, orders, sums


@triton.jit
def side(
    mine, one, two, scales, state, decay, decay_token, steps, rows, time, valid, channels, shape: tl.constexpr,
    READS: tl.constexpr, TWO: tl.constexpr, BEFORE: tl.constexpr, BEFORE_ONE: tl.constexpr, BEFORE_TWO: tl.constexpr,
):  # fmt: skip
    """Gradient of one kind of query (``READS``) or key in a block of channels [C, BK], and its two parts of the decay's gradient.

    ``mine`` meets ``one`` and, if ``TWO``, ``two``, and ``state``, that before the chunk (the cotangent of the one after it); ``scales``
    are those of the state, of ``one`` and of ``two``. ``BEFORE`` says which queries read before their token's decay: those have none to
    the previous token, and the decay's gradient contains no rounding error of that pair.
    Both ends of a pair are rounded equally here and on its other side, because their shared part must cancel in the decay's gradient.
    """
    K: tl.constexpr = shape.K
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    BK: tl.constexpr = shape.BK
    BV: tl.constexpr = shape.BV
    PRECISION: tl.constexpr = shape.PRECISION
    kind: tl.constexpr = shape.kind
    DDECAY: tl.constexpr = shape.DDECAY
    scale, scale_one, scale_two = scales
    i = rows[:, None]
    t = rows[None, :]
    count = tl.sum(valid.to(tl.int32), 0)
    inside = valid[:, None] & (channels < K)[None, :]
    d = tl.zeros([C, BK], tl.float32)
    g_one = tl.zeros([C, C], tl.float32)
    g_two = tl.zeros([C, C], tl.float32)
    for block in range(0, V, BV):
        columns = block + tl.arange(0, BV)
        there = (channels < K)[:, None] & (columns < V)[None, :]
        s = tl.load(state + channels[:, None] * V + columns[None, :], mask=there, other=0.0)
        o = rows_of(mine.cotangent, time, mine.cotangent_token, V, block, valid, BV, kind)
        d = tl.dot(o, tl.trans(s), d, input_precision=PRECISION)
        e = rows_of(one.cotangent, time, one.cotangent_token, V, block, valid, BV, kind)
        g_one = tl.dot(o, tl.trans(e), g_one, input_precision=PRECISION)
        if TWO:
            u = rows_of(two.cotangent, time, two.cotangent_token, V, block, valid, BV, kind)
            g_two = tl.dot(o, tl.trans(u), g_two, input_precision=PRECISION)
    d *= scale
    if READS:
        d *= tl.exp2(sums(i > t if BEFORE else i >= t, steps, kind))
    else:
        d *= tl.exp2(sums(i < t, steps, kind))
    vector = of_tokens(mine.vector, time, mine.vector_token, channels, inside).to(kind)
    outside = vector * d
    low_one = (g_one * scale_one).to(kind)
    low_two = (g_two * scale_two).to(kind)
    within = tl.zeros([C, BK], tl.float32)

    m = C // 2
    while m >= NEAR:
        x = from_middle(steps, rows, m, kind)
        meet = distant(rows, m, READS)
        own = tl.exp2(-tl.abs(x - steps if BEFORE else x))
        other = tl.exp2(-tl.abs(x - steps if BEFORE_ONE else x))
        vectors = of_tokens(one.vector, time, one.vector_token, channels, inside).to(kind)
        part = tl.dot(tl.where(meet, low_one, 0.0).to(kind), (vectors * other).to(kind), input_precision=PRECISION)
        if TWO:
            other = tl.exp2(-tl.abs(x - steps if BEFORE_TWO else x))
            vectors = of_tokens(two.vector, time, two.vector_token, channels, inside).to(kind)
            part = tl.dot(tl.where(meet, low_two, 0.0).to(kind), (vectors * other).to(kind), part, input_precision=PRECISION)
        if DDECAY:  # triton 3.6 does not compile the loop with a sum that nobody uses
            within += (vector * own).to(kind) * part
        d += part * own
        m = m // 2

    between = tl.zeros([C, BK], tl.float32)  # decays of the tokens between a pair's
    for distance in range(1, tl.minimum(NEAR, count)):
        place = rows - distance if READS else rows + distance
        time_there = time - distance if READS else time + distance
        there = ((place >= 0) & (place < count))[:, None] & (channels < K)[None, :]
        decays = orders(of_tokens(decay, time_there, decay_token, channels, there))
        whole = tl.exp2(between + (steps if READS else decays))
        vectors = of_tokens(one.vector, time_there, one.vector_token, channels, there).to(kind)
        fade = tl.exp2(between) if BEFORE or BEFORE_ONE else whole
        share = at_distance(low_one, rows, distance, READS) * fade * vectors
        d += share
        if BEFORE or BEFORE_ONE:
            share = tl.where(distance > 1, share, 0.0)
        if DDECAY:
            within += vector * share
        if TWO:
            vectors = of_tokens(two.vector, time_there, two.vector_token, channels, there).to(kind)
            fade = tl.exp2(between) if BEFORE or BEFORE_TWO else whole
            share = at_distance(low_two, rows, distance, READS) * fade * vectors
            d += share
            if BEFORE or BEFORE_TWO:
                share = tl.where(distance > 1, share, 0.0)
            if DDECAY:
                within += vector * share
        between += decays
    return d, outside, within
