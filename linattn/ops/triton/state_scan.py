"""Scans over the chunks of a segment: of the state forwards, and of its cotangent backwards. Only these kernels are sequential.

A program holds a [K, BV] block of the state in registers. With ``LOCAL`` it starts from an empty state and returns the segment's own
state (and, for rules that erase, in further blocks of columns the transition: the same scan of the identity without values); ``chain``
then joins the segments exactly. ``TURNED`` starts from a transposed state, as after an exchange of keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.decays import chunks_in_reach, factors_of, kept_factors
from linattn.ops.triton.tiles import CHANNEL, DELTA, ERASE, HEAD, PLAIN, first_slot, locate, products_in_parts, weight


@triton.jit(do_not_specialize=["sequences", "tokens", "scale", "slots_before", "length"])
def forward(
    q, k, v, write, decay, cu, p, p_write, b, w, q_faded, k_faded, write_faded, fade,
    starts, o, values, states, final, transition, total,
    q_token, q_head, k_token, k_head, v_token, v_head, write_token, write_head, decay_token, decay_head,
    sequences, tokens, heads, group, scale, slots_before, length,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, RULE: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
    kind: tl.constexpr, LOCAL: tl.constexpr, EVERY: tl.constexpr, OUTPUT: tl.constexpr, KEEP: tl.constexpr, START: tl.constexpr,
    TURNED: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1) + slots_before
    head = tl.program_id(2)
    n, first, last, index, begin, stop = locate(slot, cu, sequences, tokens, length, PACKED)
    if (first >= last) & ((index > 0) | LOCAL | (not FINAL)):
        return
    if LOCAL and not EVERY:
        if last >= stop:  # no segment starts from the end of this one
            return
    rows = tl.arange(0, C)
    channels = tl.arange(0, BK)
    blocks = (V + BV - 1) // BV
    identity = tl.program_id(0) >= blocks  # only LOCAL and only where the rule erases
    columns = (tl.program_id(0) - tl.where(identity, blocks, 0)) * BV + tl.arange(0, BV)
    width = tl.where(identity, K, V)
    there = columns < width
    shared = head // group
    q += shared * q_head
    k += shared * k_head
    v += head * v_head
    if RULE == ERASE:
        write += head * write_head
    state = (channels < K)[:, None] & there[None, :]

    chunk = (first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C).to(tl.int64)
    if DECAY == HEAD:
        decay += head * decay_head
    if LOCAL and DECAY == HEAD and RULE != ERASE:  # the state at the end depends on the last chunks only
        here, count = decay + first.to(tl.int64) * decay_token, (last - first + C - 1) // C
        near, vanishes = chunks_in_reach(here, decay_token, fade, chunk * heads + head, heads, last - first, C, True)
        late = tl.where(identity & vanishes, count, count - near)
        first += late * C
        chunk += late
    if LOCAL:
        s = tl.where(identity & (first < last) & (channels[:, None] == columns[None, :]), 1.0, 0.0)
    elif START:
        within = channels[:, None] + columns[None, :] * K if TURNED else channels[:, None] * V + columns[None, :]
        s = tl.load(starts + (slot.to(tl.int64) * heads + head) * K * V + within, mask=state, other=0.0)
    else:
        s = tl.zeros([BK, BV], tl.float32)
    if LOCAL and RULE == PLAIN:
        if DECAY == CHANNEL:
            whole_fade = tl.full([BK], 1.0, tl.float32)
        elif DECAY == HEAD:
            whole_fade = tl.where(vanishes, 0.0, 1.0)
        else:
            whole_fade = 1.0

    KEPT: tl.constexpr = DECAY == HEAD and RULE == DELTA  # what follows from decays was prepared
    if DECAY == HEAD and not KEPT:  # loaded a chunk ahead
        ahead = tl.load(decay + (first.to(tl.int64) + rows) * decay_token, mask=rows < last - first, other=0.0)
    for i in range((last - first + C - 1) // C):
        start = first + i * C
        valid = rows < last - start
        time = start.to(tl.int64) + rows
        place = chunk * heads + head
        reads = valid[:, None] & (channels < K)[None, :]
        writes = valid[:, None] & there[None, :]
        wide = place * (C * K) + rows[:, None] * K + channels[None, :]
        square = place * (C * C) + rows[:, None] * C + rows[None, :]
        fits = (channels < K)[None, :] & (rows >= 0)[:, None]
        if KEEP:
            tl.store(states + place * K * V + channels[:, None] * V + columns[None, :], s.to(states.dtype.element_ty), mask=state)
        if LOCAL:
            vb = tl.load(v + time[:, None] * v_token + columns[None, :], mask=writes & (not identity), other=0.0).to(kind)
        else:
            vb = tl.load(v + time[:, None] * v_token + columns[None, :], mask=writes, other=0.0).to(kind)
        if KEPT:
            read_at, to_end, faded = kept_factors(fade, place, rows)
        elif DECAY == HEAD:
            d = ahead
            ahead = tl.load(decay + (time + C) * decay_token, mask=rows < last - start - C, other=0.0)
            sums, read_at, to_end, faded = factors_of(d, BEFORE, BITS)
        if DECAY == CHANNEL:
            kb = tl.load(k_faded + wide, mask=fits, other=0.0)
            faded = tl.load(fade + place * K + channels, mask=channels < K, other=1.0)
        else:
            kb = tl.load(k + time[:, None] * k_token + channels[None, :], mask=reads, other=0.0).to(kind)

        low = s.to(kind)
        e = vb
        if RULE != PLAIN:
            bb = tl.load(b + square)
            if w is None:
                seen = tl.dot(kb, low, input_precision=PRECISION)
                if DECAY == HEAD:
                    seen *= read_at
                exact = tl.dot(bb, (vb - seen).to(kind), input_precision=PRECISION)
            else:
                wb = tl.load(w + wide, mask=fits, other=0.0)
                exact = tl.dot(bb, vb, input_precision=PRECISION)
                exact = tl.dot(wb, low, exact, input_precision=PRECISION)
            e = exact.to(kind)
            if KEEP:
                tl.store(values + time[:, None] * heads * V + head * V + columns[None, :], e, mask=writes)
        if OUTPUT:
            if DECAY == CHANNEL:
                qb = tl.load(q_faded + wide, mask=fits, other=0.0)
            else:
                qb = tl.load(q + time[:, None] * q_token + channels[None, :], mask=reads, other=0.0).to(kind)
            if (RULE == PLAIN) and (DECAY < CHANNEL) and (not BEFORE):
                if PRECISION == "tf32x3":
                    a = products_in_parts(q + time[:, None] * q_token, k + time[:, None] * k_token, valid, K, C, PRECISION) * scale
                else:
                    a = tl.dot(qb, tl.trans(kb), input_precision=PRECISION) * scale
                if DECAY == HEAD:
                    a *= weight(sums[:, None] - sums[None, :], BITS)
                a = tl.where(rows[:, None] >= rows[None, :], a, 0.0).to(kind)
            else:
                a = tl.load(p + square)
            out = tl.dot(qb, low, input_precision=PRECISION)
            if DECAY == HEAD:
                out *= read_at * scale
            elif DECAY < CHANNEL:
                out *= scale
            if RULE == ERASE:
                out = tl.dot(a, vb, out, input_precision=PRECISION)
                out = tl.dot(tl.load(p_write + square), e, out, input_precision=PRECISION)
            else:
                out = tl.dot(a, e, out, input_precision=PRECISION)
            tl.store(o + time[:, None] * heads * V + head * V + columns[None, :], out.to(o.dtype.element_ty), mask=writes)

        if DECAY == CHANNEL:
            s *= faded[:, None]
        if DECAY == HEAD:
            s *= faded
            vb = (vb * to_end).to(kind)
            e = vb if RULE == PLAIN else (exact * to_end).to(kind)
        if RULE == ERASE:
            if DECAY == CHANNEL:
                ub = tl.load(write_faded + wide, mask=fits, other=0.0)
            else:
                ub = tl.load(write + time[:, None] * write_token + channels[None, :], mask=reads, other=0.0).to(kind)
            s = tl.dot(tl.trans(kb), vb, s, input_precision=PRECISION)
            s = tl.dot(tl.trans(ub), e, s, input_precision=PRECISION)
        else:
            s = tl.dot(tl.trans(kb), e, s, input_precision=PRECISION)
        if LOCAL and RULE == PLAIN and DECAY > 0:
            whole_fade *= faded
        chunk += 1

    if LOCAL:
        at = slot.to(tl.int64) * heads + head
        tl.store(starts + at * K * V + channels[:, None] * V + columns[None, :], s, mask=state & (not identity))
        if RULE != PLAIN:
            tl.store(transition + at * K * K + channels[:, None] * K + columns[None, :], s, mask=state & identity)
        else:
            if tl.program_id(0) == 0:
                if DECAY == CHANNEL:
                    tl.store(total + at * K + channels, whole_fade, mask=channels < K)
                else:
                    tl.store(total + at * K + channels, tl.zeros([BK], tl.float32) + whole_fade, mask=channels < K)
    elif FINAL:
        if last >= stop:
            at = n.to(tl.int64) * heads + head
            tl.store(final + at * K * V + channels[:, None] * V + columns[None, :], s, mask=state)


@triton.jit(do_not_specialize=["sequences", "tokens", "scale", "slots_before", "length", "chunks_before", "part"])
def backward(
    q, k, write, do, decay, cu, p, p_write, b, t_inverse, w, q_faded, k_faded, write_faded, fade,
    ends, dv, x_read, dstates, dinitial, between,
    q_token, q_head, k_token, k_head, do_token, do_head, write_token, write_head, decay_token, decay_head,
    sequences, tokens, heads, group, scale, slots_before, length, chunks_before, part,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DECAY: tl.constexpr, RULE: tl.constexpr,
    BEFORE: tl.constexpr, PACKED: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
    kind: tl.constexpr, LOCAL: tl.constexpr, START: tl.constexpr, TURNED: tl.constexpr, EVERY: tl.constexpr = False,
    IN_PARTS: tl.constexpr = False,
):  # fmt: skip
    """``IN_PARTS`` it scans ``part`` chunks of each segment, from ``chunks_before`` on, and ``dstates`` has only the cotangents of these.

    ``ends`` are then the cotangents after the part; those before it are stored in ``between``, the same memory or other.
    """
    slot = tl.program_id(1) + slots_before
    head = tl.program_id(2)
    n, first, last, index, begin, _stop = locate(slot, cu, sequences, tokens, length, PACKED)
    if (first >= last) & ((index > 0) | LOCAL):
        return
    if LOCAL and not EVERY:
        if index == 0:  # no segment ends at the start of this one
            return
    rows = tl.arange(0, C)
    channels = tl.arange(0, BK)
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    there = columns < V
    shared = head // group
    q += shared * q_head
    k += shared * k_head
    do += head * do_head
    if RULE == ERASE:
        write += head * write_head
    state = (channels < K)[:, None] & there[None, :]
    block = channels[:, None] * V + columns[None, :]
    at = (slot.to(tl.int64) * heads + head) * K * V

    if START and not LOCAL:
        ds = tl.load(ends + at + (channels[:, None] + columns[None, :] * K if TURNED else block), mask=state, other=0.0)
    else:
        ds = tl.zeros([BK, BV], tl.float32)

    if DECAY == HEAD:
        decay += head * decay_head
    if LOCAL and DECAY == HEAD and RULE != ERASE:  # the cotangent at the start depends on the first chunks only
        place = (first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C).to(tl.int64) * heads + head
        here = decay + first.to(tl.int64) * decay_token
        last = tl.minimum(last, first + C * chunks_in_reach(here, decay_token, fade, place, heads, last - first, C, False)[0])
    count = (last - first + C - 1) // C
    if IN_PARTS:
        count = tl.minimum(count, chunks_before + part) - chunks_before
        first += chunks_before * C
    chunk = (first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C).to(tl.int64) + count - 1
    if IN_PARTS:
        dstates += (slot.to(tl.int64) * part + count - 1 - chunk) * heads * K * V
    KEPT: tl.constexpr = DECAY == HEAD and RULE == DELTA  # what follows from decays was prepared
    if DECAY == HEAD and not KEPT:  # loaded a chunk ahead
        start = first + (count - 1) * C
        ahead = tl.load(decay + (start.to(tl.int64) + rows) * decay_token, mask=(rows < last - start) & (count > 0), other=0.0)
    for back in range(count):
        start = first + (count - 1 - back) * C
        valid = rows < last - start
        time = start.to(tl.int64) + rows
        place = chunk * heads + head
        reads = valid[:, None] & (channels < K)[None, :]
        writes = valid[:, None] & there[None, :]
        wide = place * (C * K) + rows[:, None] * K + channels[None, :]
        swapped = place * (C * C) + rows[None, :] * C + rows[:, None]
        fits = (channels < K)[None, :] & (rows >= 0)[:, None]
        if dstates is not None:
            tl.store(dstates + place * K * V + block, ds.to(dstates.dtype.element_ty), mask=state)
        dob = tl.load(do + time[:, None] * do_token + columns[None, :], mask=writes, other=0.0).to(kind)
        if KEPT:
            read_at, to_end, faded = kept_factors(fade, place, rows)
        elif DECAY == HEAD:
            d = ahead
            ahead = tl.load(decay + (time - C) * decay_token, mask=(rows >= 0) & (back < count - 1), other=0.0)
            sums, read_at, to_end, faded = factors_of(d, BEFORE, BITS)
        if DECAY == CHANNEL:
            qb = tl.load(q_faded + wide, mask=fits, other=0.0)
            faded = tl.load(fade + place * K + channels, mask=channels < K, other=1.0)
        else:
            qb = tl.load(q + time[:, None] * q_token + channels[None, :], mask=reads, other=0.0).to(kind)

        if (RULE != PLAIN) or (not LOCAL):
            low = ds.to(kind)
            if DECAY == CHANNEL:
                kb = tl.load(k_faded + wide, mask=fits, other=0.0)
            else:
                kb = tl.load(k + time[:, None] * k_token + channels[None, :], mask=reads, other=0.0).to(kind)
            if (RULE == PLAIN) and (DECAY < CHANNEL) and (not BEFORE):
                if PRECISION == "tf32x3":
                    a = products_in_parts(k + time[:, None] * k_token, q + time[:, None] * q_token, valid, K, C, PRECISION) * scale
                else:
                    a = tl.dot(kb, tl.trans(qb), input_precision=PRECISION) * scale
                if DECAY == HEAD:
                    a *= weight(sums[None, :] - sums[:, None], BITS)
                a = tl.where(rows[:, None] <= rows[None, :], a, 0.0).to(kind)
            else:
                a = tl.load(p + swapped)
            de = tl.dot(kb, low, input_precision=PRECISION)  # cotangent of the values written with k: e, or v if the rule erases
            if DECAY == HEAD:
                de *= to_end
            de = tl.dot(a, dob, de, input_precision=PRECISION)
            if RULE == ERASE:
                if DECAY == CHANNEL:
                    ub = tl.load(write_faded + wide, mask=fits, other=0.0)
                else:
                    ub = tl.load(write + time[:, None] * write_token + channels[None, :], mask=reads, other=0.0).to(kind)
                du = tl.dot(ub, low, input_precision=PRECISION)
                if DECAY == HEAD:
                    du *= to_end
                du = tl.dot(tl.load(p_write + swapped), dob, du, input_precision=PRECISION).to(kind)
            else:
                du = de.to(kind)
            if RULE == DELTA:
                dvb = tl.dot(tl.load(b + swapped), du, input_precision=PRECISION)
            if not LOCAL:
                where = time[:, None] * heads * V + head * V + columns[None, :]
                if RULE == PLAIN:
                    dvb = de
                if RULE == ERASE:
                    dvb = tl.dot(tl.load(b + swapped), du, de, input_precision=PRECISION)
                    x = tl.dot(tl.load(t_inverse + swapped), du, input_precision=PRECISION)
                    tl.store(x_read + where, x.to(x_read.dtype.element_ty), mask=writes)
                tl.store(dv + where, dvb.to(dv.dtype.element_ty), mask=writes)

        if DECAY < CHANNEL:
            if DECAY == HEAD:
                dob = (dob * (read_at * scale)).to(kind)
                ds *= faded
            else:
                dob = (dob * scale).to(kind)
        else:
            ds *= faded[:, None]
        ds = tl.dot(tl.trans(qb), dob, ds, input_precision=PRECISION)
        if RULE != PLAIN and w is None:
            if DECAY == HEAD:
                dvb *= read_at
            ds = tl.dot(tl.trans(kb), (-dvb).to(kind), ds, input_precision=PRECISION)
        elif RULE != PLAIN:
            wb = tl.load(w + wide, mask=fits, other=0.0)
            ds = tl.dot(tl.trans(wb), du, ds, input_precision=PRECISION)
        chunk -= 1

    if LOCAL:
        tl.store(ends + at + block, ds, mask=state)
    elif between is not None:
        tl.store(between + at + block, ds, mask=state)
    elif dinitial is not None:
        if index == 0:
            tl.store(dinitial + (n.to(tl.int64) * heads + head) * K * V + block, ds, mask=state)


@triton.jit(do_not_specialize=["sequences", "tokens", "sequences_before", "length"])
def chain(
    pieces, transition, total, first, last, cu, sequences, tokens, heads, sequences_before, length,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr, FADES: tl.constexpr, ERASES: tl.constexpr,
    REVERSE: tl.constexpr, FROM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Join segments in place from the own state of each (``REVERSE``: from the own cotangent).

    ``first`` [N, H, K, V] is the state before the first segment (the cotangent after the last one), if ``FROM``.
    """
    n = tl.program_id(1) + sequences_before
    head = tl.program_id(2)
    if PACKED:
        begin = tl.load(cu + n).to(tl.int32)
        stop = tl.load(cu + n + 1).to(tl.int32)
    else:
        begin = 0
        stop = tokens
    slot = first_slot(n, begin, tokens, length, PACKED)
    count = tl.maximum((stop - begin + length - 1) // length, 1)  # an empty sequence has one segment, which keeps its state
    channels = tl.arange(0, BK)
    columns = tl.program_id(0) * BV + tl.arange(0, BV)
    state = (channels < K)[:, None] & (columns < V)[None, :]
    block = channels[:, None] * V + columns[None, :]
    if FROM:
        s = tl.load(first + (n.to(tl.int64) * heads + head) * K * V + block, mask=state, other=0.0)
    else:
        s = tl.zeros([BK, BV], tl.float32)
    for i in range(count):
        at = (slot + (count - 1 - i if REVERSE else i)).to(tl.int64) * heads + head
        here = pieces + at * K * V + block
        more = i < count - 1
        piece = tl.load(here, mask=state & more, other=0.0)
        tl.store(here, s, mask=state)
        if ERASES and BP >= K:
            square = channels[None, :] * K + channels[:, None] if REVERSE else channels[:, None] * K + channels[None, :]
            there = (channels < K)[:, None] & (channels < K)[None, :] & more
            m = tl.load(transition + at * K * K + square, mask=there, other=0.0)
            s = tl.dot(m, s, piece, input_precision="tf32x3")
        elif ERASES:
            tl.debug_barrier()  # the state is read in parts by other threads than wrote it
            s = piece
            for part in range(0, K, BP):
                inner = part + tl.arange(0, BP)
                there = (channels < K)[:, None] & (inner < K)[None, :] & more
                if REVERSE:
                    square = inner[None, :] * K + channels[:, None]
                else:
                    square = channels[:, None] * K + inner[None, :]
                m = tl.load(transition + at * K * K + square, mask=there, other=0.0)
                before = pieces + at * K * V + inner[:, None] * V + columns[None, :]
                below = tl.load(before, mask=(inner < K)[:, None] & (columns < V)[None, :], other=0.0)
                s = tl.dot(m, below, s, input_precision="tf32x3")
        else:
            if FADES:
                s *= tl.load(total + at * K + channels, mask=(channels < K) & more, other=0.0)[:, None]
            s += piece
