"""Gradient of one kind of query or key of a chunk that one scaling serves, and sums of a decay's gradient: the parts of gradients.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linattn.ops.triton.anchors import apart, to_edge, to_late_anchor
from linattn.ops.triton.tiles import CHANNEL, ERASE, HEAD, leading, orders, sums, weight

ALL = tl.constexpr(-1)
QUERY = tl.constexpr(0)
READ = tl.constexpr(1)
KEY = tl.constexpr(2)
WRITE = tl.constexpr(3)


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
    ANCHORS: Any  # with a decay per channel
    ROLE: Any  # role that a launch computes, or ALL


class Chunk(NamedTuple):
    """A chunk in a block of channels."""

    rows: Any  # 0 to C - 1
    time: Any  # its tokens
    valid: Any
    channels: Any
    inside: Any
    steps: Any  # decay of each token in binary orders
    total: Any  # their sums, with a decay per head
    x: Any  # binary orders from the anchor, with a decay per channel
    halves: Any  # their orders
    decay_at: Any


class Found(NamedTuple):
    """Sums of the gradient of a decay so far: of ``own`` and later tokens, [C, BK] with a decay per channel; for heads [C] before sums over
    tokens, and likewise of later and of earlier tokens alone.
    """

    own: Any
    later: Any
    earlier: Any


class Role(NamedTuple):
    """Cotangents and vectors of a kind of query or key, and their strides of time."""

    cotangent: Any  # of a key: its values
    cotangent_token: Any
    vector: Any
    vector_token: Any
    size: Any  # channels
    tile: Any  # the chunk's vectors [C, BK], or None if each use loads them again, as registers are few


@triton.constexpr_function
def computes(role: Any, launched: Any) -> bool:
    """True if a launch, of one role or all, computes the gradients of vectors in a ``role``."""
    return launched in (ALL, role)


@triton.constexpr_function
def ends(rule: Any, launched: Any) -> bool:
    """True if a launch computes the last of the roles, and so the gradient of the decay and what is done."""
    return launched in (ALL, WRITE if rule == ERASE else KEY)


@triton.constexpr_function
def depth(size: int, block: int) -> int | None:
    """Stages of loads in a loop over ``size`` values in blocks: those of the launch, None, if no stage is filled again, else 1.

    On Hopper Triton 3.6 lets products of several sums overlap the loads of the third block into what they still read.
    """
    return None if size <= 2 * block else 1


@triton.jit
def rows_of(tensor, time, token, size, block, valid, BV: tl.constexpr, kind: tl.constexpr):
    """Load a block of values or cotangents [C, BV]."""
    columns = block + tl.arange(0, BV)
    return tl.load(tensor + time[:, None] * token + columns[None, :], mask=valid[:, None] & (columns < size)[None, :], other=0.0).to(kind)


@triton.jit
def of_tokens(tensor, time, token, channels, inside):
    """Load a block [C, BK] of a tensor that points to its head."""
    return tl.load(tensor + time[:, None] * token + channels[None, :], mask=inside, other=0.0)


@triton.jit
def vectors_of(of, time, channels, inside):
    """Vectors [C, BK] of a kind of query or key in float32."""
    if of.tile is None:
        vectors = of_tokens(of.vector, time, of.vector_token, channels, inside)
    else:
        vectors = of.tile
    return vectors.to(tl.float32)


@triton.jit
def factor(x, decay_at, inside, READS: tl.constexpr, BEFORE: tl.constexpr):
    """Factor that scales a kind of query (``READS``) or key [C, BK] to its anchor, ``x`` binary orders away."""
    if BEFORE:
        x -= orders(tl.load(decay_at, mask=inside, other=0.0))
    return tl.exp2(x if READS else -x)


@triton.jit
def pairs_of_values(readers, writers, time, valid, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, TWO_READ: tl.constexpr,
                    TWO_WRITE: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr):  # fmt: skip
    """Products [C, C] of cotangents of one or two kinds of queries (rows) and values of one or two kinds of keys."""
    q, r = readers
    k, w = writers
    qk = tl.zeros([C, C], tl.float32)
    qw = tl.zeros([C, C], tl.float32)
    rk = tl.zeros([C, C], tl.float32)
    rw = tl.zeros([C, C], tl.float32)
    for block in tl.range(0, V, BV, num_stages=depth(V, BV)):
        o = rows_of(q.cotangent, time, q.cotangent_token, V, block, valid, BV, kind)
        e = tl.trans(rows_of(k.cotangent, time, k.cotangent_token, V, block, valid, BV, kind))
        qk = tl.dot(o, e, qk, input_precision=PRECISION)
        if TWO_READ:
            x = rows_of(r.cotangent, time, r.cotangent_token, V, block, valid, BV, kind)
            rk = tl.dot(x, e, rk, input_precision=PRECISION)
        if TWO_WRITE:
            u = tl.trans(rows_of(w.cotangent, time, w.cotangent_token, V, block, valid, BV, kind))
            qw = tl.dot(o, u, qw, input_precision=PRECISION)
            if TWO_READ:
                rw = tl.dot(x, u, rw, input_precision=PRECISION)
    return qk, qw, rk, rw


@triton.jit
def diagonal(g, rows):
    """Products of a token's cotangent and its own value [C, 1]."""
    return tl.sum(tl.where(rows[:, None] == rows[None, :], g, 0.0), 1)[:, None]


@triton.jit
def earlier(g, scale, chunk, shape: tl.constexpr, BEFORE: tl.constexpr):
    """Weights [C, C] of queries, which may read ``BEFORE`` their token's decay, and earlier tokens."""
    BITS: tl.constexpr = shape.BITS
    kind: tl.constexpr = shape.kind
    if shape.DECAY == HEAD:
        reader = chunk.total - chunk.steps if BEFORE else chunk.total
        g *= weight(reader[:, None] - chunk.total[None, :], BITS)
    return tl.where(chunk.rows[:, None] > chunk.rows[None, :], g * scale, 0.0).to(kind)


@triton.jit
def scaled(of, chunk, shape: tl.constexpr, READS: tl.constexpr, BEFORE: tl.constexpr):
    """Vectors [C, BK] of a kind of query (``READS``) or key, with a decay per channel scaled to its anchor."""
    kind: tl.constexpr = shape.kind
    vectors = vectors_of(of, chunk.time, chunk.channels, chunk.inside).to(kind)
    if shape.DECAY == CHANNEL:
        vectors = (vectors * factor(chunk.x, chunk.decay_at, chunk.inside, READS, BEFORE)).to(kind)
    return vectors


@triton.jit
def weighted(low, of, part, on, chunk, shape: tl.constexpr, READS: tl.constexpr, BEFORE: tl.constexpr):
    """Add to ``part`` [C, BK] the keys (not ``READS``: queries) that ``mine`` meets, weighted by ``low`` [C, C].

    With two anchors early keys that late queries meet are brought on to the late anchor, rounded as keys are themselves in :func:`role`.
    Late queries that early keys meet are added to ``on``, since another factor brings these keys to them.
    """
    PRECISION: tl.constexpr = shape.PRECISION
    vectors = scaled(of, chunk, shape, not READS, BEFORE)
    if shape.DECAY == CHANNEL and shape.ANCHORS == 2:
        cross = tl.where(apart(chunk.rows), low, 0.0).to(low.dtype)
        if READS:
            late = to_late_anchor(vectors.to(tl.float32), chunk.halves).to(low.dtype)
            part = tl.dot(cross, late, part, input_precision=PRECISION)
        else:
            on = tl.dot(cross, vectors, on, input_precision=PRECISION)
        low = tl.where(apart(chunk.rows), 0.0, low).to(low.dtype)
    return tl.dot(low, vectors, part, input_precision=PRECISION), on


@triton.jit
def neighbours(low, of, chunk, READS: tl.constexpr):
    """Separate the pairs of a token and the one before it (``READS``; else after it): their sum [C, BK], and the other weights.

    These pairs have no decay between them, so the vectors of ``of`` are not scaled.
    """
    i = chunk.rows[:, None]
    t = chunk.rows[None, :]
    near = (i == t + 1) if READS else (i == t - 1)
    weights = tl.sum(tl.where(near, low.to(tl.float32), 0.0), 1)
    other = chunk.rows - 1 if READS else chunk.rows + 1
    there = (other >= 0) & (other < tl.sum(chunk.valid.to(tl.int32), 0))
    time = chunk.time - 1 if READS else chunk.time + 1
    inside = there[:, None] & (chunk.channels < of.size)[None, :]
    vectors = of_tokens(of.vector, time, of.vector_token, chunk.channels, inside)
    return weights[:, None] * vectors.to(tl.float32), tl.where(near, 0.0, low.to(tl.float32)).to(low.dtype)


@triton.jit
def role(
    mine, one, two, weights, scales, state, opposite, chunk, shape: tl.constexpr,
    READS: tl.constexpr, TWO: tl.constexpr, BEFORE: tl.constexpr, APART_ONE: tl.constexpr, APART_TWO: tl.constexpr,
):  # fmt: skip
    """Gradient of one kind of query (``READS``) or key [C, BK], its two parts of the decay's gradient, a token's product with itself, with
    one and with two, and the products [BK] of the state and the ``opposite`` one, unless this is None (with a decay per head their sum).

    ``mine`` meets ``one`` and, if ``TWO``, ``two`` with the ``weights`` [C, C], and ``state``, that before the chunk (the cotangent of
    that after it). With a decay per channel, which the vectors contain, the weights are formed here, beside the products with the
    state; ``scales`` are those of the state, of ``one`` and of ``two``. With a decay per head the two parts are sums over channels [C], and
    the second has both where they count alike.
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
    channels = chunk.channels
    low_one, low_two = weights
    scale, scale_one, scale_two = scales
    none = tl.zeros([C], tl.float32)
    d = tl.zeros([C, BK], tl.float32)
    past = tl.zeros([BK], tl.float32)
    g_one = tl.zeros([C, C], tl.float32)
    g_two = tl.zeros([C, C], tl.float32)
    g_past = tl.zeros([BK, BK], tl.float32)
    for block in tl.range(0, V, BV, num_stages=depth(V, BV)):
        columns = block + tl.arange(0, BV)
        there = (channels < K)[:, None] & (columns < V)[None, :]
        s = tl.load(state + channels[:, None] * V + columns[None, :], mask=there, other=0.0)
        if opposite is not None:
            also = tl.load(opposite + channels[:, None] * V + columns[None, :], mask=there, other=0.0)
            if DECAY == HEAD:
                g_past = tl.dot(s.to(kind), tl.trans(also.to(kind)), g_past, input_precision=PRECISION)
            else:
                past += tl.sum(s.to(tl.float32) * also.to(tl.float32), 1)
        o = rows_of(mine.cotangent, chunk.time, mine.cotangent_token, V, block, chunk.valid, BV, kind)
        d = tl.dot(o, tl.trans(s), d, input_precision=PRECISION)
        if DECAY == CHANNEL:
            e = rows_of(one.cotangent, chunk.time, one.cotangent_token, V, block, chunk.valid, BV, kind)
            g_one = tl.dot(o, tl.trans(e), g_one, input_precision=PRECISION)
            if TWO:
                u = rows_of(two.cotangent, chunk.time, two.cotangent_token, V, block, chunk.valid, BV, kind)
                g_two = tl.dot(o, tl.trans(u), g_two, input_precision=PRECISION)
    if DECAY != HEAD:
        d *= scale
    if DECAY == HEAD and opposite is not None:
        i = tl.arange(0, BK)
        past = tl.sum(tl.where(i[:, None] == i[None, :], g_past, 0.0))  # one axis after the other does not compile for Blackwell
    if DECAY == CHANNEL:
        other = chunk.rows[:, None] > chunk.rows[None, :] if READS else chunk.rows[:, None] < chunk.rows[None, :]
        low_one = tl.where(other, g_one * scale_one, 0.0).to(kind)
        if TWO:
            low_two = tl.where(other, g_two * scale_two, 0.0).to(kind)
    vector = vectors_of(mine, chunk.time, channels, chunk.inside).to(kind)
    to_anchor = vector
    if DECAY == CHANNEL:
        own = factor(chunk.x, chunk.decay_at, chunk.inside, READS, BEFORE)
        d = to_edge(d * own, chunk.halves, chunk.rows, shape.ANCHORS, READS)
        to_anchor = (vector * own).to(kind)
    if DECAY == HEAD:
        reader = chunk.total - chunk.steps if BEFORE else chunk.total
        d *= (scale * weight(reader if READS else tl.sum(chunk.steps, 0) - chunk.total, BITS))[:, None]
    ONCE: tl.constexpr = DECAY == HEAD and READS and not (APART_ONE or APART_TWO)  # both parts of the decay's gradient in one sum
    outside = none if ONCE else part_of_decay(vector * d, DECAY)
    if APART_ONE:
        near, low_one = neighbours(low_one, one, chunk, READS)
        d += near
    part = tl.zeros([C, BK], tl.float32)
    on = tl.zeros([C, BK], tl.float32)
    part, on = weighted(low_one, one, part, on, chunk, shape, READS, APART_ONE and not READS)
    if TWO:
        if APART_TWO:
            near, low_two = neighbours(low_two, two, chunk, READS)
            d += near
        part, on = weighted(low_two, two, part, on, chunk, shape, READS, APART_TWO and not READS)
    within = part_of_decay(vector * (d + part) if ONCE else to_anchor * part, DECAY)
    if DECAY == CHANNEL:
        part *= own
        if shape.ANCHORS == 2 and not READS:
            within += to_late_anchor(to_anchor.to(tl.float32), chunk.halves).to(kind) * on
            part += to_late_anchor(own, chunk.halves) * on
    return d + part, outside, within, diagonal(g_one, chunk.rows), diagonal(g_two, chunk.rows), past


@triton.jit
def part_of_decay(a, DECAY: tl.constexpr):
    """Part [C, BK] of the decay's gradient, with a decay per head summed over channels [C]."""
    return tl.sum(a, 1) if DECAY == HEAD else a


@triton.jit
def counted(found, a, rows, LATER: tl.constexpr, OWN: tl.constexpr, DECAY: tl.constexpr, kind: tl.constexpr):
    """Add a part of the decay's gradient: for each token the sum of rows of ``a`` [C, BK] at ``LATER`` or earlier tokens, with its ``OWN``.

    Exact to float32, because shared summands of the parts must cancel. With a decay per head ``a`` [C] is summed over channels, and
    :func:`sums_of_head` sums over tokens.
    """
    own, later, earlier = found
    if DECAY == HEAD:
        if LATER and OWN:
            own += a
        elif LATER:
            later += a
        else:
            earlier += a
    else:
        i = rows[:, None]
        t = rows[None, :]
        if LATER:
            which = i <= t if OWN else i < t
        else:
            which = i >= t if OWN else i > t
        if kind == tl.float32:
            own += sums(which, a, kind)
        else:
            high = leading(a)
            own = tl.dot(which.to(tl.bfloat16), high.to(tl.bfloat16), own + sums(which, a - high, kind))
    return Found(own, later, earlier)


@triton.jit
def all_but_last(a, last_a, b, last_b):
    """Sum of two neighbouring parts without the last number, and this: a scan then sums what comes before a number."""
    return a + last_a + b, last_b


@triton.jit
def sums_of_head(found, LATER: tl.constexpr):
    """Gradient [C] of a decay per head from what is :func:`counted`; ``LATER`` says that some of it is of later tokens alone.

    Not by differences of sums over all tokens, which would contain the rounding errors of large summands.
    """
    own, later, earlier = found
    total = tl.cumsum(own, 0, reverse=True) + tl.associative_scan((tl.zeros_like(earlier), earlier), 0, all_but_last)[0]
    if LATER:
        total += tl.associative_scan((tl.zeros_like(later), later), 0, all_but_last, reverse=True)[0]
    return total
