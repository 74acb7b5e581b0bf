"""Gradients of a chunk from the state before it and the cotangent of the state after it: every chunk at once.

A token's read besides its output is a second query with its own cotangent (the delta rule reads v - kᵀS by the key, the erase
rule rᵀS), and a second write is a second key. So every rule is plain attention between one or two kinds of queries and one or
two kinds of keys:

    plain    q (cotangent do)                             k (value v)
    delta    q (do), k (cotangent -de = -dv, strictly)    k (value e)
    erase    q (do), r (cotangent x, strictly, before)    k (value v), w (value u)

The gradients of queries and keys are mirror images: ``role`` computes either, one after the other, so that few tensors are live at
once. The products of cotangents and values that weight the pairs are formed once for both; with a decay per channel, for each role
again beside its products with the state, and both sides are scaled to anchors (anchors.py): unsettled.py has the blocks of channels in
which that exceeds the range of float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from linattn.ops.triton.anchors import Halves, from_anchor, in_range, orders_of_halves
from linattn.ops.triton.prepare import away_from_zero
from linattn.ops.triton.roles import (
    KEY,
    QUERY,
    READ,
    WRITE,
    Chunk,
    Found,
    Role,
    Shape,
    computes,
    counted,
    diagonal,
    earlier,
    ends,
    of_tokens,
    pairs_of_values,
    role,
    sums_of_head,
    vectors_of,
)
from linattn.ops.triton.tiles import CHANNEL, DELTA, ERASE, HEAD, PLAIN, chunk_slots, first_left, first_slot, locate, orders, whole


@triton.constexpr_function
def shape_of(*constants: Any) -> Shape:
    return Shape(*constants)


@triton.jit
def units_of(slot, heads, head, column, K: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr):
    """Indices in ``done`` of a block's units of channels, and the mask of those that exist."""
    COUNT: tl.constexpr = (K + UNIT - 1) // UNIT
    unit = column * (BK // UNIT) + tl.arange(0, BK // UNIT)
    return (slot.to(tl.int64) * heads + head) * COUNT + unit, unit < COUNT


@triton.jit
def of_block(slot, head, first_channel, first, last, steps, x, halves, tensors, strides, heads, group, scale, shape: tl.constexpr):
    """Store the gradients of a chunk in a block of channels; returns that of a decay per head [C], summed over the channels."""
    K: tl.constexpr = shape.K
    V: tl.constexpr = shape.V
    C: tl.constexpr = shape.C
    BK: tl.constexpr = shape.BK
    BV: tl.constexpr = shape.BV
    DECAY: tl.constexpr = shape.DECAY
    RULE: tl.constexpr = shape.RULE
    BEFORE: tl.constexpr = shape.BEFORE
    BITS: tl.constexpr = shape.BITS
    PRECISION: tl.constexpr = shape.PRECISION
    kind: tl.constexpr = shape.kind
    DDECAY: tl.constexpr = shape.DDECAY
    q, k, v, read, write, decay, beta, bonus, do, values, de, states, dstates, dq, dk, dread, dwrite, ddecay, dbeta, dbonus = tensors[:20]
    so_far = tensors[20]
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head = strides[:10]
    decay_token, decay_head, beta_token, beta_head, do_token, do_head = strides[10:]
    rows = tl.arange(0, C)
    valid = rows < last - first
    time = first.to(tl.int64) + rows
    place = slot.to(tl.int64) * heads + head
    channels = first_channel + tl.arange(0, BK)
    inside = valid[:, None] & (channels < K)[None, :]
    at = time[:, None] * heads * K + head * K + channels[None, :]  # indices in contiguous tensors [B, T, H, K]
    row = heads * V  # stride of time of values and de [B, T, H, V]
    states += place * K * V
    dstates += place * K * V
    queries = q + (head // group) * q_head
    keys = k + (head // group) * k_head
    query = None
    key = None
    if DECAY == HEAD and RULE != ERASE:  # loaded once, at the start, beside the cotangents; with more they would be spilled
        query = of_tokens(queries, time, q_token, channels, inside).to(kind)
        key = of_tokens(keys, time, k_token, channels, inside).to(kind)
    of_q = Role(do + head * do_head, do_token, queries, q_token, K, query)
    of_k = Role(v + head * v_head, v_token, keys, k_token, K, key)
    of_r = of_q
    of_w = of_k
    if RULE == DELTA:
        of_k = Role(values + head * V, row, keys, k_token, K, key)
        of_r = Role(de + head * V, row, keys, k_token, K, key)
    if RULE == ERASE:
        of_r = Role(de + head * V, row, read + head * read_head, read_token, K, None)
        of_w = Role(values + head * V, row, write + head * write_head, write_token, K, None)
    total = steps
    decay_at = decay
    if DECAY == HEAD:
        total = tl.cumsum(steps, 0)
        faded = tl.exp2(tl.sum(steps.to(tl.float32), 0) * (2.0**-BITS))
    if DECAY == CHANNEL:
        decay_at = decay + head * decay_head + time[:, None] * decay_token + channels[None, :]
        faded = tl.exp2(halves.early + halves.late)
    sign: tl.constexpr = -1.0 if RULE == DELTA else 1.0
    QUERIES: tl.constexpr = computes(QUERY, shape.ROLE)
    READS: tl.constexpr = RULE != PLAIN and computes(READ, shape.ROLE)
    KEYS: tl.constexpr = computes(KEY, shape.ROLE)
    WRITES: tl.constexpr = RULE == ERASE and computes(WRITE, shape.ROLE)
    chunk = Chunk(rows, time, valid, channels, inside, steps, total, x, halves, decay_at)

    qk = tl.zeros([C, C], kind)
    qw = qk
    rk = qk
    rw = qk
    if DECAY != CHANNEL:
        qk, qw, rk, rw = pairs_of_values(
            (of_q, of_r), (of_k, of_w), time, valid, V, C, BV, RULE != PLAIN, RULE == ERASE, PRECISION, kind
        )  # fmt: skip
        same = diagonal(qk, rows)
        same_w = diagonal(qw, rows)
        strength = diagonal(rk, rows)
        qk = earlier(qk, scale, chunk, shape, BEFORE)
        qw = earlier(qw, scale, chunk, shape, BEFORE)
        rk = earlier(rk, sign, chunk, shape, RULE == ERASE)
        rw = earlier(rw, sign, chunk, shape, RULE == ERASE)
        if RULE == DELTA:
            if first_channel == 0:
                store_strength(strength, beta + head * beta_head, beta_token, dbeta + head, heads, time, valid)

    none = tl.zeros([C], tl.float32)
    if DECAY == CHANNEL and DDECAY:
        found = Found(tl.zeros([C, BK], tl.float32), none, none)
    else:
        found = Found(none, none, none)
    if QUERIES:
        dqb, outside, within, own, own_w, past = role(
            of_q, of_k, of_w, (qk, qw), (scale, scale, scale), states, dstates if DDECAY else None, chunk, shape,
            True, RULE == ERASE, BEFORE, BEFORE, False,
        )  # fmt: skip
        if DECAY != CHANNEL:
            own = same
            own_w = same_w
        kb = vectors_of(of_k, time, channels, inside)
        if BEFORE:
            u = tl.load(bonus + head * K + channels, mask=channels < K, other=0.0).to(tl.float32)[None, :]
            qb = vectors_of(of_q, time, channels, inside)
            tl.store(dbonus + place * K + channels, tl.sum(own * scale * qb * kb, 0), mask=channels < K)
            kb *= u
        dqb += own * scale * kb
        if RULE == ERASE:
            dqb += own_w * scale * vectors_of(of_w, time, channels, inside)
        tl.store(dq + at, dqb.to(dq.dtype.element_ty), mask=inside)
        if DDECAY:
            found = counted(found, outside + within, rows, True, not BEFORE, DECAY, kind)
            past *= faded  # what passes the whole chunk

    if READS:
        drb, outside, within, strength, _, _ = role(
            of_r, of_k, of_w, (rk, rw), (sign, sign, sign), states, None, chunk, shape,
            True, RULE == ERASE, RULE == ERASE, RULE == ERASE, RULE == ERASE,
        )  # fmt: skip
        if RULE == DELTA and DECAY == CHANNEL:
            if first_channel == 0:
                store_strength(strength, beta + head * beta_head, beta_token, dbeta + head, heads, time, valid)
        if RULE == ERASE:
            tl.store(dread + at, drb.to(dread.dtype.element_ty), mask=inside)
        elif not KEYS:
            tl.store(dk + at, drb.to(dk.dtype.element_ty), mask=inside)
        if DDECAY:
            found = counted(found, outside + within, rows, True, RULE != ERASE, DECAY, kind)

    if KEYS:
        dkb, outside, within, own, _, _ = role(
            of_k, of_q, of_r, (tl.trans(qk), tl.trans(rk)), (1.0, scale, sign), dstates, None, chunk, shape,
            False, RULE != PLAIN, False, BEFORE, RULE == ERASE,
        )  # fmt: skip
        if DECAY != CHANNEL:
            own = same
        qb = vectors_of(of_q, time, channels, inside)
        if BEFORE:
            qb *= tl.load(bonus + head * K + channels, mask=channels < K, other=0.0).to(tl.float32)[None, :]
        dkb += own * scale * qb
        if RULE == DELTA:
            dkb += drb if READS else tl.load(dk + at, mask=inside, other=0.0)
        tl.store(dk + at, dkb.to(dk.dtype.element_ty), mask=inside)
        if DDECAY:
            found = counted(found, outside, rows, False, False, DECAY, kind)
            found = counted(found, -within, rows, True, True, DECAY, kind)

    if WRITES:
        dwb, outside, within, own_w, _, _ = role(
            of_w, of_q, of_r, (tl.trans(qw), tl.trans(rw)), (1.0, scale, 1.0), dstates, None, chunk, shape,
            False, True, False, False, True,
        )  # fmt: skip
        if DECAY != CHANNEL:
            own_w = same_w
        qb = vectors_of(of_q, time, channels, inside)
        dwb += own_w * scale * qb
        tl.store(dwrite + at, dwb.to(dwrite.dtype.element_ty), mask=inside)
        if DDECAY:
            found = counted(found, outside, rows, False, False, DECAY, kind)
            found = counted(found, -within, rows, True, True, DECAY, kind)

    dd = found.own
    if DDECAY and DECAY == HEAD:
        dd = sums_of_head(found, BEFORE or RULE == ERASE) + past
    elif DDECAY:
        dd += past[None, :] if QUERIES else tl.load(so_far + at, mask=inside, other=0.0)
        if ends(RULE, shape.ROLE):
            tl.store(ddecay + at, dd.to(ddecay.dtype.element_ty), mask=inside)
        else:
            tl.store(so_far + at, dd, mask=inside)
    return dd


@triton.jit
def store_strength(product, beta, beta_token, dbeta, token, time, valid):
    """Store the gradient of a delta rule's strength from the products [C, 1] of a token's cotangents, -de and e."""
    b = away_from_zero(tl.load(beta + time * beta_token, mask=valid, other=1.0).to(tl.float32))
    tl.store(dbeta + time * token, tl.sum(product, 1) / (b * b), mask=valid)


@triton.jit(do_not_specialize=["sequences", "tokens", "scale", "chunks_before", "length", "part"])
def gradients(
    q, k, v, read, write, decay, beta, bonus, do, cu,
    values, de, states, dstates,
    dq, dk, dread, dwrite, ddecay, dbeta, dbonus, so_far, done,
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head, decay_token, decay_head,
    beta_token, beta_head, do_token, do_head,
    sequences, tokens, heads, group, scale, chunks_before, length, part,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, RULE: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr,
    DDECAY: tl.constexpr, UNIT: tl.constexpr, SPAN: tl.constexpr, ANCHORS: tl.constexpr,
    ROLE: tl.constexpr, IN_PARTS: tl.constexpr,
):  # fmt: skip
    """A program computes the blocks of channels of ``SPAN``, and stores their part of the gradient of a decay per head in ``ddecay``
    [B, T, H, spans].

    ``IN_PARTS`` the chunk is one of ``part`` of each segment of ``length`` tokens, from ``chunks_before`` on, and ``dstates`` has only the
    cotangents of these.
    With a decay per channel a launch for one anchor and one for two (``ANCHORS``) mark in ``done`` [chunks, H, units of channels] what they
    compute; unsettled.py computes the others. All but the first have few programs, which look for what is left. ``ROLE`` is the role of
    tokens that a launch computes, or ALL; from launch to launch ``so_far`` [B, T, H, K] sums the gradient of the decay.
    """
    shape: tl.constexpr = shape_of(K, V, C, BK, BV, DECAY, RULE, BEFORE, BITS, PRECISION, kind, DDECAY, ANCHORS, ROLE)
    OF_SPAN: tl.constexpr = SPAN if DECAY == HEAD and DDECAY else BK
    COLUMNS: tl.constexpr = (K + OF_SPAN - 1) // OF_SPAN
    chunk = tl.program_id(0) // COLUMNS  # the blocks of a chunk run at a time, so that those after the first find its tokens in the cache
    if IN_PARTS:
        segment = chunk // part
        n, first, last, _, begin, _ = locate(segment, cu, sequences, tokens, length, PACKED)
        first += (chunks_before + chunk - segment * part) * C
        last = tl.minimum(first + C, last)
        slot = first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C
        dstates += (chunk - slot).to(tl.int64) * heads * K * V
    tensors = (
        q, k, v, read, write, decay, beta, bonus, do, values, de, states, dstates, dq, dk, dread, dwrite, ddecay, dbeta, dbonus, so_far,
    )  # fmt: skip
    strides = (
        q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head,
        decay_token, decay_head, beta_token, beta_head, do_token, do_head,
    )  # fmt: skip
    if ANCHORS == 2:
        items = chunk_slots(sequences, tokens, C, PACKED) * heads * COLUMNS
        # Numbers that do not depend on the item are formed again: kept, they would take registers.
        for item in tl.range(first_left(done, items, K, BK, UNIT), items, tl.num_programs(0), num_stages=1, disable_licm=True):
            place = item // COLUMNS
            slot = place // heads
            _, first, last, _, _, _ = locate(slot, cu, sequences, tokens, C, PACKED)
            units, known = units_of(slot, heads, place % heads, item % COLUMNS, K, BK, UNIT)
            if (first < last) & (tl.min(tl.load(done + units, mask=known, other=1), 0) == 0):
                in_anchors(slot, place % heads, item % COLUMNS, first, last, tensors, strides, done, heads, group, scale, UNIT, shape)
    else:
        head = tl.program_id(1)
        column = tl.program_id(0) % COLUMNS
        if not IN_PARTS:
            slot = chunk + chunks_before
            _, first, last, _, _, _ = locate(slot, cu, sequences, tokens, C, PACKED)
        if first >= last:
            return
        if DECAY == CHANNEL:
            in_anchors(slot, head, column, first, last, tensors, strides, done, heads, group, scale, UNIT, shape)
        else:
            rows = tl.arange(0, C)
            valid = rows < last - first
            time = first.to(tl.int64) + rows
            d = tl.zeros([C], tl.float32)
            if DECAY == HEAD:
                d = tl.load(decay + time * decay_token + head * decay_head, mask=valid, other=0.0).to(tl.float32)
            steps = whole(d, BITS)
            halves = Halves(d, d)
            if DECAY == HEAD and DDECAY:
                dd = tl.zeros([C], tl.float32)
                for block in range(0, SPAN, BK):
                    channel = column * SPAN + block
                    dd += of_block(slot, head, channel, first, last, steps, steps, halves, tensors, strides, heads, group, scale, shape)
                tl.store(ddecay + (time * heads + head) * COLUMNS + column, dd.to(ddecay.dtype.element_ty), mask=valid)
            else:
                of_block(slot, head, column * BK, first, last, steps, steps, halves, tensors, strides, heads, group, scale, shape)


@triton.jit
def in_anchors(slot, head, column, first, last, tensors, strides, done, heads, group, scale, UNIT: tl.constexpr, shape: tl.constexpr):
    """Store the gradients of a chunk in a block of channels if its decays are in range of the anchors, and mark in ``done`` if so."""
    K: tl.constexpr = shape.K
    C: tl.constexpr = shape.C
    BK: tl.constexpr = shape.BK
    kind: tl.constexpr = shape.kind
    ANCHORS: tl.constexpr = shape.ANCHORS
    decay = tensors[5]
    decay_token, decay_head = strides[10:12]
    rows = tl.arange(0, C)
    time = first.to(tl.int64) + rows
    channels = column * BK + tl.arange(0, BK)
    inside = (rows < last - first)[:, None] & (channels < K)[None, :]
    steps = orders(of_tokens(decay + head * decay_head, time, decay_token, channels, inside))
    halves = orders_of_halves(steps, rows)
    settled = in_range(halves, ANCHORS, kind)
    if ends(shape.RULE, shape.ROLE):
        units, known = units_of(slot, heads, head, column, K, BK, UNIT)
        tl.store(done + units, tl.zeros([BK // UNIT], tl.int32) + settled.to(tl.int32), mask=known)
    if settled:
        x = from_anchor(steps, rows, ANCHORS, kind)
        of_block(slot, head, column * BK, first, last, steps, x, halves, tensors, strides, heads, group, scale, shape)


@triton.jit(do_not_specialize=["rows"])
def shared(given, total, rows, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """Sum [rows, GROUP, K] over the heads of a group: [rows, K]. torch's own sum reaches a third of the memory bandwidth."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    channel = tl.arange(0, BK)[None, :]
    there = (row < rows) & (channel < K)
    x = tl.zeros([ROWS, BK], tl.float32)
    for head in tl.static_range(GROUP):
        x += tl.load(given + (row * GROUP + head) * K + channel, mask=there, other=0.0).to(tl.float32)
    tl.store(total + row * K + channel, x.to(total.dtype.element_ty), mask=there)
