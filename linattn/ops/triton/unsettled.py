"""Gradients of a chunk's blocks of channels with decays too strong for one scaling, see gradients.py: tokens pair in smaller blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.gradients import shape_of, store_strength, units_of
from linattn.ops.triton.roles import Role, of_tokens, rows_of
from linattn.ops.triton.sides import side
from linattn.ops.triton.tiles import DELTA, ERASE, PLAIN, chunk_slots, first_left, locate, orders, sums


@triton.jit
def of_block(slot, head, column, first, last, tensors, strides, heads, group, scale, shape: tl.constexpr):
    """The gradients of a chunk in a block of its channels."""
    K: tl.constexpr = shape.K
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    BK: tl.constexpr = shape.BK
    BV: tl.constexpr = shape.BV
    RULE: tl.constexpr = shape.RULE
    BEFORE: tl.constexpr = shape.BEFORE
    kind: tl.constexpr = shape.kind
    DDECAY: tl.constexpr = shape.DDECAY
    q, k, v, read, write, decay, beta, bonus, do, values, de, states, dstates, dq, dk, dread, dwrite, ddecay, dbeta, dbonus = tensors
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head = strides[:10]
    decay_token, decay_head, beta_token, beta_head, do_token, do_head = strides[10:]
    rows = tl.arange(0, C)
    valid = rows < last - first
    i = rows[:, None]
    t = rows[None, :]
    time = first.to(tl.int64) + rows
    place = slot.to(tl.int64) * heads + head
    row = heads * V  # stride of time of values and de [B, T, H, V]
    states += place * K * V
    dstates += place * K * V
    decay += head * decay_head
    keys = k + (head // group) * k_head
    of_q = Role(do + head * do_head, do_token, q + (head // group) * q_head, q_token, K, None)
    of_k = Role(v + head * v_head, v_token, keys, k_token, K, None)
    of_r = of_q
    of_w = of_k
    if RULE == DELTA:
        of_k = Role(values + head * V, row, keys, k_token, K, None)
        of_r = Role(de + head * V, row, keys, k_token, K, None)
    if RULE == ERASE:
        of_r = Role(de + head * V, row, read + head * read_head, read_token, K, None)
        of_w = Role(values + head * V, row, write + head * write_head, write_token, K, None)

    # A token's own value, weighted by its cotangent; and the gradient of its strength.
    own = tl.zeros([C], tl.float32)
    own_w = tl.zeros([C], tl.float32)
    strength = tl.zeros([C], tl.float32)
    for block in range(0, V, BV):
        cotangent = rows_of(of_q.cotangent, time, do_token, V, block, valid, BV, tl.float32)
        value = rows_of(of_k.cotangent, time, of_k.cotangent_token, V, block, valid, BV, tl.float32)
        own += tl.sum(cotangent * value, 1)
        if RULE == DELTA:
            strength += tl.sum(value * rows_of(of_r.cotangent, time, row, V, block, valid, BV, tl.float32), 1)
        if RULE == ERASE:
            own_w += tl.sum(cotangent * rows_of(of_w.cotangent, time, row, V, block, valid, BV, tl.float32), 1)
    own *= scale
    own_w *= scale
    if RULE == DELTA:
        if column == 0:
            store_strength(strength[:, None], beta + head * beta_head, beta_token, dbeta + head, heads, time, valid)
    channels = column * BK + tl.arange(0, BK)
    inside = valid[:, None] & (channels < K)[None, :]
    at = time[:, None] * heads * K + head * K + channels[None, :]  # indices in contiguous tensors [B, T, H, K]
    steps = orders(of_tokens(decay, time, decay_token, channels, inside))
    faded = tl.exp2(tl.sum(steps, 0))
    sign: tl.constexpr = -1.0 if RULE == DELTA else 1.0

    dqb, outside, cross = side(
        of_q, of_k, of_w, (scale, scale, scale), states, decay, decay_token, steps, rows, time, valid, channels, shape,
        True, RULE == ERASE, BEFORE, False, False,
    )  # fmt: skip
    if BEFORE:
        cross_before = outside + cross
        cross = tl.zeros([C, BK], tl.float32)
    else:
        cross += outside
        cross_before = tl.zeros([C, BK], tl.float32)
    kb = of_tokens(of_k.vector, time, k_token, channels, inside).to(kind)
    if BEFORE:
        qb = of_tokens(of_q.vector, time, q_token, channels, inside).to(kind)
        u = tl.load(bonus + head * K + channels, mask=channels < K, other=0.0).to(tl.float32)[None, :]
        tl.store(dbonus + place * K + channels, tl.sum(own[:, None] * qb * kb, 0), mask=channels < K)
        dqb += own[:, None] * u * kb
    else:
        dqb += own[:, None] * kb
    if RULE == ERASE:
        dqb += own_w[:, None] * of_tokens(of_w.vector, time, write_token, channels, inside).to(kind)
    tl.store(dq + at, dqb.to(dq.dtype.element_ty), mask=inside)

    if RULE != PLAIN:
        drb, outside, inner = side(
            of_r, of_k, of_w, (sign, sign, sign), states, decay, decay_token, steps, rows, time, valid, channels, shape,
            True, RULE == ERASE, RULE == ERASE, False, False,
        )  # fmt: skip
        if RULE == ERASE:
            cross_before += outside + inner
            tl.store(dread + at, drb.to(dread.dtype.element_ty), mask=inside)
        else:
            cross += outside + inner

    dkb, send, inner = side(
        of_k, of_q, of_r, (1.0, scale, sign), dstates, decay, decay_token, steps, rows, time, valid, channels, shape,
        False, RULE != PLAIN, False, BEFORE, RULE == ERASE,
    )  # fmt: skip
    cross -= inner
    qb = of_tokens(of_q.vector, time, q_token, channels, inside).to(kind)
    if BEFORE:
        dkb += own[:, None] * u * qb
    else:
        dkb += own[:, None] * qb
    if RULE == DELTA:
        dkb += drb
    tl.store(dk + at, dkb.to(dk.dtype.element_ty), mask=inside)

    if RULE == ERASE:
        dwb, outside, inner = side(
            of_w, of_q, of_r, (1.0, scale, 1.0), dstates, decay, decay_token, steps, rows, time, valid, channels, shape,
            False, True, False, False, True,
        )  # fmt: skip
        cross -= inner
        send += outside
        dwb += own_w[:, None] * qb
        tl.store(dwrite + at, dwb.to(dwrite.dtype.element_ty), mask=inside)

    if DDECAY:
        past = tl.zeros([BK], tl.float32)  # the part of the state that passes the whole chunk
        for block in range(0, V, BV):
            columns = block + tl.arange(0, BV)
            where = channels[:, None] * V + columns[None, :]
            both = (channels < K)[:, None] & (columns < V)[None, :]
            s = tl.load(states + where, mask=both, other=0.0).to(tl.float32)
            past += tl.sum(s * tl.load(dstates + where, mask=both, other=0.0).to(tl.float32), 1)
        dd = sums(i <= t, cross, kind) + sums(i > t, send, kind) + (faded * past)[None, :]
        if BEFORE or RULE == ERASE:
            dd += sums(i < t, cross_before, kind)
        tl.store(ddecay + at, dd.to(ddecay.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens", "scale", "chunks_before"])
def unsettled(
    q, k, v, read, write, decay, beta, bonus, do, cu,
    values, de, states, dstates,
    dq, dk, dread, dwrite, ddecay, dbeta, dbonus, so_far, done,
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head, decay_token, decay_head,
    beta_token, beta_head, do_token, do_head,
    sequences, tokens, heads, group, scale, chunks_before,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, RULE: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr,
    DDECAY: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Programs compute the blocks of channels that ``done`` does not mark as computed by ``gradients``."""
    shape: tl.constexpr = shape_of(K, V, C, BK, BV, DECAY, RULE, BEFORE, BITS, PRECISION, kind, DDECAY, 0, -1)
    tensors = (q, k, v, read, write, decay, beta, bonus, do, values, de, states, dstates, dq, dk, dread, dwrite, ddecay, dbeta, dbonus)
    strides = (
        q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head,
        decay_token, decay_head, beta_token, beta_head, do_token, do_head,
    )  # fmt: skip
    COLUMNS: tl.constexpr = (K + BK - 1) // BK
    items = chunk_slots(sequences, tokens, C, PACKED) * heads * COLUMNS
    # Numbers that do not depend on the item are formed again: kept, they would take registers.
    for item in tl.range(first_left(done, items, K, BK, UNIT), items, tl.num_programs(0), num_stages=1, disable_licm=True):
        place = item // COLUMNS
        slot = place // heads
        _, first, last, _, _, _ = locate(slot, cu, sequences, tokens, C, PACKED)
        units, known = units_of(slot, heads, place % heads, item % COLUMNS, K, BK, UNIT)
        if (first < last) & (tl.min(tl.load(done + units, mask=known, other=1), 0) == 0):
            of_block(slot, place % heads, item % COLUMNS, first, last, tensors, strides, heads, group, scale, shape)
