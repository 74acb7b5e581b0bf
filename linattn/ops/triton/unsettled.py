"""Gradients of a chunk's blocks of channels with decays too strong for one scaling, see gradients.py: tokens pair in smaller blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.gradients import units_of
from linattn.ops.triton.prepare import away_from_zero
from linattn.ops.triton.sides import rows_of, side
from linattn.ops.triton.tiles import DELTA, ERASE, PLAIN, locate, orders, sums


@triton.jit
def of_block(
    slot, head, column, first, last, tensors, strides, heads, group, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, RULE: tl.constexpr,
    BEFORE: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr, DDECAY: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk in a block of its channels."""
    q, k, v, read, write, decay, beta, bonus, do, values, de, states, dstates, dq, dk, dread, dwrite, ddecay, dbeta, dbonus = tensors
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head = strides[:10]
    decay_token, decay_head, beta_token, beta_head, do_token, do_head = strides[10:]
    rows = tl.arange(0, C)
    valid = rows < last - first
    i = rows[:, None]
    t = rows[None, :]
    time = first.to(tl.int64) + rows
    place = slot.to(tl.int64) * heads + head
    shared = head // group
    q += shared * q_head
    k += shared * k_head
    v += head * v_head
    do += head * do_head
    states += place * K * V
    dstates += place * K * V
    if RULE != PLAIN:
        values += head * V
        de += head * V
    row = heads * V  # stride of time of values and de [B, T, H, V]

    # A token's own value, weighted by its cotangent; and the gradient of its strength.
    own = tl.zeros([C], tl.float32)
    own_w = tl.zeros([C], tl.float32)
    strength = tl.zeros([C], tl.float32)
    for block in range(0, V, BV):
        cotangent = rows_of(do, time, do_token, V, block, valid, BV, tl.float32)
        if RULE == DELTA:
            value = rows_of(values, time, row, V, block, valid, BV, tl.float32)
            strength += tl.sum(value * rows_of(de, time, row, V, block, valid, BV, tl.float32), 1)
        else:
            value = rows_of(v, time, v_token, V, block, valid, BV, tl.float32)
        own += tl.sum(cotangent * value, 1)
        if RULE == ERASE:
            own_w += tl.sum(cotangent * rows_of(values, time, row, V, block, valid, BV, tl.float32), 1)
    own *= scale
    own_w *= scale
    if RULE == DELTA:
        if column == 0:
            b = away_from_zero(tl.load(beta + time * beta_token + head * beta_head, mask=valid, other=1.0).to(tl.float32))
            tl.store(dbeta + time * heads + head, strength / (b * b), mask=valid)
    channels = column * BK + tl.arange(0, BK)
    inside = valid[:, None] & (channels < K)[None, :]
    at = time[:, None] * heads * K + head * K + channels[None, :]  # indices in contiguous tensors [B, T, H, K]
    d = tl.load(decay + time[:, None] * decay_token + head * decay_head + channels[None, :], mask=inside, other=0.0)
    steps = orders(d)
    faded = tl.exp2(tl.sum(steps, 0))
    qb = tl.load(q + time[:, None] * q_token + channels[None, :], mask=inside, other=0.0).to(kind)
    kb = tl.load(k + time[:, None] * k_token + channels[None, :], mask=inside, other=0.0).to(kind)
    rb = kb
    wb = kb
    if RULE == ERASE:
        rb = tl.load(read + time[:, None] * read_token + head * read_head + channels[None, :], mask=inside, other=0.0).to(kind)
        wb = tl.load(write + time[:, None] * write_token + head * write_head + channels[None, :], mask=inside, other=0.0).to(kind)
    key_values = values if RULE == DELTA else v
    key_row = row if RULE == DELTA else v_token

    dqb, outside, cross = side(
        do, do_token, key_values, key_row, values, row, states, qb, kb, wb, steps, rows, time, valid, channels,
        scale, scale, scale, K, V, C, BK, BV, True, RULE == ERASE, BEFORE, False, False, DDECAY, PRECISION, kind,
    )  # fmt: skip
    if BEFORE:
        cross_before = outside + cross
        cross = tl.zeros([C, BK], tl.float32)
    else:
        cross += outside
        cross_before = tl.zeros([C, BK], tl.float32)
    if BEFORE:
        u = tl.load(bonus + head * K + channels, mask=channels < K, other=0.0).to(tl.float32)[None, :]
        tl.store(dbonus + place * K + channels, tl.sum(own[:, None] * qb * kb, 0), mask=channels < K)
        dqb += own[:, None] * u * kb
    else:
        dqb += own[:, None] * kb
    if RULE == ERASE:
        dqb += own_w[:, None] * wb
    tl.store(dq + at, dqb.to(dq.dtype.element_ty), mask=inside)

    if RULE != PLAIN:
        sign = -1.0 if RULE == DELTA else 1.0
        drb, outside, inner = side(
            de, row, key_values, key_row, values, row, states, rb, kb, wb, steps, rows, time, valid, channels,
            sign, sign, sign, K, V, C, BK, BV, True, RULE == ERASE, RULE == ERASE, False, False, DDECAY, PRECISION, kind,
        )  # fmt: skip
        if RULE == ERASE:
            cross_before += outside + inner
            tl.store(dread + at, drb.to(dread.dtype.element_ty), mask=inside)
        else:
            cross += outside + inner

    sign = -1.0 if RULE == DELTA else 1.0
    dkb, send, inner = side(
        key_values, key_row, do, do_token, de, row, dstates, kb, qb, rb, steps, rows, time, valid, channels,
        1.0, scale, sign, K, V, C, BK, BV, False, RULE != PLAIN, False, BEFORE, RULE == ERASE, DDECAY, PRECISION, kind,
    )  # fmt: skip
    cross -= inner
    if BEFORE:
        dkb += own[:, None] * u * qb
    else:
        dkb += own[:, None] * qb
    if RULE == DELTA:
        dkb += drb
    tl.store(dk + at, dkb.to(dk.dtype.element_ty), mask=inside)

    if RULE == ERASE:
        dwb, outside, inner = side(
            values, row, do, do_token, de, row, dstates, wb, qb, rb, steps, rows, time, valid, channels,
            1.0, scale, 1.0, K, V, C, BK, BV, False, True, False, False, True, DDECAY, PRECISION, kind,
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
    dq, dk, dread, dwrite, ddecay, dbeta, dbonus, done,
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head, decay_token, decay_head,
    beta_token, beta_head, do_token, do_head,
    sequences, tokens, heads, group, scale, chunks_before,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, RULE: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr,
    DDECAY: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A program computes one block of channels, unless ``done`` marks it as computed by ``gradients``."""
    tensors = (q, k, v, read, write, decay, beta, bonus, do, values, de, states, dstates, dq, dk, dread, dwrite, ddecay, dbeta, dbonus)
    strides = (
        q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head,
        decay_token, decay_head, beta_token, beta_head, do_token, do_head,
    )  # fmt: skip
    slot = tl.program_id(0) + chunks_before
    head = tl.program_id(1)
    column = tl.program_id(2)
    _, first, last, _, _, _ = locate(slot, cu, sequences, tokens, C, PACKED)
    if first >= last:
        return
    units, known = units_of(slot, heads, head, column, K, BK, UNIT)
    if tl.min(tl.load(done + units, mask=known, other=1), 0) > 0:
        return
    of_block(
        slot, head, column, first, last, tensors, strides, heads, group, scale,
        K, V, C, BK, BV, RULE, BEFORE, PRECISION, kind, DDECAY,
    )  # fmt: skip
