"""Gradients of a chunk from the state before it and the cotangent of the state after it: every chunk at once.

What a token reads besides its output is one more query, with a cotangent of its own (the delta rule reads v - kᵀS with the key,
the erase rule rᵀS), and what it writes one more key. So every rule is plain attention between one or two kinds of queries and
one or two kinds of keys:

    plain    q (cotangent do)                             k (value v)
    delta    q (do), k (cotangent -de = -dv, strictly)    k (value e)
    erase    q (do), r (cotangent x, strictly, before)    k (value v), w (value u)

A query and a key are each other's mirror image: ``side`` (sides.py) serves both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.prepare import away_from_zero
from linattn.ops.triton.sides import rows_of, side
from linattn.ops.triton.tiles import (
    CHANNEL,
    DELTA,
    ERASE,
    HEAD,
    LOG2E,
    PLAIN,
    TAME,
    from_middle,
    locate,
    orders,
    sums,
    whole,
)


@triton.jit
def orders_of(
    decay, decay_token, decay_head, first, last, head, column,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """A block of decays per channel [C, BK] in binary orders, and the orders between each token and the middle of the chunk."""
    rows = tl.arange(0, C)
    channels = column * BK + tl.arange(0, BK)
    inside = (rows < last - first)[:, None] & (channels < K)[None, :]
    time = first.to(tl.int64) + rows
    d = tl.load(decay + time[:, None] * decay_token + head * decay_head + channels[None, :], mask=inside, other=0.0)
    steps = orders(d)
    return steps, from_middle(steps, rows, C // 2, kind)


@triton.jit
def of_block(
    slot, head, column, first, last, steps, x, tensors, strides, heads, group, scale,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, RULE: tl.constexpr,
    BEFORE: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr,
    DDECAY: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk, with a decay per channel of a block of its channels."""
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
    if DECAY == CHANNEL:
        first_k = column * BK
        last_k = first_k + BK
        faded = tl.exp2(tl.sum(steps, 0))
    else:
        first_k = 0
        last_k = K
    total = steps
    q += shared * q_head
    k += shared * k_head
    v += head * v_head
    do += head * do_head
    states += place * K * V
    dstates += place * K * V
    if RULE != PLAIN:
        values += head * V
        de += head * V
    row = heads * V  # of values and de [B, T, H, V]

    # A token's own value, weighed by what it is read with; and the gradient of its strength.
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
        b = away_from_zero(tl.load(beta + time * beta_token + head * beta_head, mask=valid, other=1.0).to(tl.float32))
        tl.store(dbeta + time * heads + head, strength / (b * b), mask=valid)

    if DECAY == HEAD:
        d = tl.load(decay + time * decay_token + head * decay_head, mask=valid, other=0.0).to(tl.float32)
        steps = whole(d, BITS)
        total = tl.cumsum(steps, 0)
        faded = tl.exp2(tl.sum(d, 0) * LOG2E)
        # For its gradient: what queries read across it (at the query, minus at the key), apart for those that read before it,
        # and what keys send past the end of the chunk.
        crossing = tl.zeros([C], tl.float32)
        crossing_before = tl.zeros([C], tl.float32)
        sending = tl.zeros([C], tl.float32)
        passing = tl.zeros([BK], tl.float32)

    for block_k in range(first_k, last_k, BK):
        channels = block_k + tl.arange(0, BK)
        inside = valid[:, None] & (channels < K)[None, :]
        at = time[:, None] * heads * K + head * K + channels[None, :]  # in contiguous tensors [B, T, H, K]
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
            do, do_token, key_values, key_row, values, row, states, qb, kb, wb, total, steps, x, rows, time, valid, channels,
            scale, scale, scale, K, V, C, BK, BV, DECAY, SETTLED, True, RULE == ERASE, BEFORE, False, False, BITS, PRECISION, kind,
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
                de, row, key_values, key_row, values, row, states, rb, kb, wb, total, steps, x, rows, time, valid, channels,
                sign, sign, sign, K, V, C, BK, BV, DECAY, SETTLED, True, RULE == ERASE, RULE == ERASE, False, False, BITS, PRECISION, kind,
            )  # fmt: skip
            if RULE == ERASE:
                cross_before += outside + inner
                tl.store(dread + at, drb.to(dread.dtype.element_ty), mask=inside)
            else:
                cross += outside + inner

        sign = -1.0 if RULE == DELTA else 1.0
        dkb, send, inner = side(
            key_values, key_row, do, do_token, de, row, dstates, kb, qb, rb, total, steps, x, rows, time, valid, channels,
            1.0, scale, sign, K, V, C, BK, BV, DECAY, SETTLED, False, RULE != PLAIN, False, BEFORE, RULE == ERASE, BITS, PRECISION, kind,
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
                values, row, do, do_token, de, row, dstates, wb, qb, rb, total, steps, x, rows, time, valid, channels,
                1.0, scale, 1.0, K, V, C, BK, BV, DECAY, SETTLED, False, True, False, False, True, BITS, PRECISION, kind,
            )  # fmt: skip
            cross -= inner
            send += outside
            dwb += own_w[:, None] * qb
            tl.store(dwrite + at, dwb.to(dwrite.dtype.element_ty), mask=inside)

        if DDECAY:
            past = tl.zeros([BK], tl.float32)  # what passes through the whole chunk
            for block in range(0, V, BV):
                columns = block + tl.arange(0, BV)
                where = channels[:, None] * V + columns[None, :]
                both = (channels < K)[:, None] & (columns < V)[None, :]
                s = tl.load(states + where, mask=both, other=0.0).to(tl.float32)
                past += tl.sum(s * tl.load(dstates + where, mask=both, other=0.0).to(tl.float32), 1)
            if DECAY == CHANNEL:
                dd = sums(i <= t, cross, kind) + sums(i > t, send, kind) + (faded * past)[None, :]
                if BEFORE or RULE == ERASE:
                    dd += sums(i < t, cross_before, kind)
                tl.store(ddecay + at, dd.to(ddecay.dtype.element_ty), mask=inside)
            else:
                crossing += tl.sum(cross, 1)
                crossing_before += tl.sum(cross_before, 1)
                sending += tl.sum(send, 1)
                passing += past
    if DDECAY and DECAY == HEAD:
        dd = tl.sum(tl.where(i <= t, crossing[None, :], 0.0), 1) + tl.sum(tl.where(i > t, sending[None, :], 0.0), 1)
        dd += tl.sum(tl.where(i < t, crossing_before[None, :], 0.0), 1) + faded * tl.sum(passing, 0)
        tl.store(ddecay + time * heads + head, dd.to(ddecay.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["sequences", "tokens", "scale", "chunks_before"])
def gradients(
    q, k, v, read, write, decay, beta, bonus, do, cu,
    values, de, states, dstates,
    dq, dk, dread, dwrite, ddecay, dbeta, dbonus,
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head, decay_token, decay_head,
    beta_token, beta_head, do_token, do_head,
    sequences, tokens, heads, group, scale, chunks_before,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, RULE: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr,
    DDECAY: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """With a decay per channel a program has one block of channels: those that settle in one piece belong to one kernel, which has
    no more to do for them than without a decay, and the others to another.
    """
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
    if DECAY == CHANNEL:
        steps, x = orders_of(decay, decay_token, decay_head, first, last, head, column, K, C, BK, kind)
        if (tl.max(tl.max(tl.abs(x), 1), 0) <= TAME) != SETTLED:
            return
    else:
        steps = whole(tl.zeros([C], tl.float32), BITS)
        x = steps
    of_block(
        slot, head, column, first, last, steps, x, tensors, strides, heads, group, scale,
        K, V, C, BK, BV, DECAY, RULE, BEFORE, BITS, PRECISION, kind, DDECAY, SETTLED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def shared(given, total, rows, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """Sums [rows, K] over the heads that share something, of [rows, GROUP, K]; torch's own sum reaches a third of the memory's rate."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = tl.arange(0, BK)[None, :]
    there = (row < rows) & (channel < K)
    x = tl.zeros([ROWS, BK], tl.float32)
    for head in tl.static_range(GROUP):
        x += tl.load(given + (row * GROUP + head) * K + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(total + row * K + channel, x.to(total.dtype.element_ty), mask=there)
