"""Parts of a chunk that do not depend on the state: masked products of queries and keys, the triangular inverse, decayed operands.

One program per chunk and head, all chunks in parallel. With e_i the value that the rule writes for token i, the scans then compute

    plain    e = v                                  o = Q S + P v
    delta    e = B v + W S    (B = T diag β)        o = Q S + P e
    erase    u = B v + W S    (T = (I - A_rw)^-1)   o = Q S + P v + P_w u

with S the state before the chunk, and S' = λ S + Kᵀ e (+ K_wᵀ u) the one after it. Q, K and K_w stand for decayed queries and
keys: with a decay per head the scans scale rows themselves, with one per channel this kernel writes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linattn.ops.triton.tiles import (
    CHANNEL,
    DELTA,
    ERASE,
    HEAD,
    NEAR,
    PLAIN,
    distant,
    from_middle,
    inverse,
    locate,
    orders,
    sums,
    weight,
    whole,
    within_range,
)


@triton.jit(do_not_specialize=["sequences", "tokens", "scale"])
def prepare(
    q, k, v, read, write, decay, beta, bonus, cu,
    p, p_write, b, t_inverse, w, q_faded, k_faded, write_faded, fade, done,
    q_token, q_head, k_token, k_head, read_token, read_head, write_token, write_head, decay_token, decay_head, beta_token, beta_head,
    sequences, tokens, heads, group, scale,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, RULE: tl.constexpr, BEFORE: tl.constexpr,
    PACKED: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
    kind: tl.constexpr, SETTLED: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """With a decay per channel one launch (``SETTLED``) computes the chunks with decays within the range of one product and marks them in
    ``done`` [chunks, H]; another computes the rest, as tiles.py says.

    ``LOOP`` hides from the compiler how often the loop over blocks of channels runs. For a B200 Triton 3.6 does not compile a single pass:
    the maximum of a sum in tensor memory must not meet the second maximum, over the tokens, without a loop's end between them.
    """
    slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    _, first, last, _, _, _ = locate(slot.to(tl.int32), cu, sequences, tokens, C, PACKED)
    if first >= last:
        return
    rows = tl.arange(0, C)
    valid = rows < last - first
    time = first.to(tl.int64) + rows
    place = slot * heads + head
    shared = head // group
    if DECAY == CHANNEL and not SETTLED:
        if tl.load(done + place) > 0:
            return

    if DECAY == HEAD:
        d = tl.load(decay + time * decay_token + head * decay_head, mask=valid, other=0.0).to(tl.float32)
        steps = whole(d, BITS)
        total_steps = tl.cumsum(steps, 0)
    diagonal = rows[:, None] == rows[None, :]
    later = rows[:, None] > rows[None, :]

    # Products of the reading side (q; k or r) with the writing side (k; w), summed over blocks of channels.
    a_qk = tl.zeros([C, C], tl.float32)
    a_rk = tl.zeros([C, C], tl.float32)
    a_qw = tl.zeros([C, C], tl.float32)
    a_rw = tl.zeros([C, C], tl.float32)
    own = tl.zeros([C], tl.float32)  # product of a token's query and key
    own_w = tl.zeros([C], tl.float32)
    far = tl.zeros([C], tl.float32)  # largest distance from the middle of the chunk, in binary orders
    stop = K + tl.minimum(first, 0) if LOOP else K
    for block in range(0, stop, BK):
        channels = block + tl.arange(0, BK)
        inside = valid[:, None] & (channels < K)[None, :]
        qb = tl.load(q + time[:, None] * q_token + shared * q_head + channels[None, :], mask=inside, other=0.0)
        kb = tl.load(k + time[:, None] * k_token + shared * k_head + channels[None, :], mask=inside, other=0.0)
        if RULE == ERASE:
            rb = tl.load(read + time[:, None] * read_token + head * read_head + channels[None, :], mask=inside, other=0.0)
            wb = tl.load(write + time[:, None] * write_token + head * write_head + channels[None, :], mask=inside, other=0.0)
        if DECAY == CHANNEL:
            d = tl.load(decay + time[:, None] * decay_token + head * decay_head + channels[None, :], mask=inside, other=0.0)
            a = orders(d)
            if SETTLED:
                x = from_middle(a, rows, C // 2, kind)
                before = tl.sum(tl.where(rows[:, None] < C // 2, a, 0.0), 0)
                after = tl.sum(tl.where(rows[:, None] < C // 2, 0.0, a), 0)
                reads = tl.exp2(x)
                writes = tl.exp2(-x)
                reads_before = reads
                far = tl.maximum(far, tl.max(tl.abs(x), 1))
                if BEFORE or RULE == ERASE:
                    reads_before = tl.exp2(x - a)
                    far = tl.maximum(far, tl.max(tl.abs(x - a), 1))
                to_start = tl.exp2(before)[None, :]
                to_end = writes * tl.exp2(after)[None, :]
                wide = place * (C * K) + rows[:, None] * K + channels[None, :]
                fits = (channels < K)[None, :] & (rows >= 0)[:, None]
                q_reads = qb * (reads_before if BEFORE else reads)
                tl.store(q_faded + wide, (q_reads * (to_start * scale)).to(kind), mask=fits)
                tl.store(k_faded + wide, (kb * to_end).to(kind), mask=fits)
                tl.store(fade + place * K + channels, tl.exp2(before + after), mask=channels < K)
                qe = q_reads.to(kind)
                kt = tl.trans((kb * writes).to(kind))
                a_qk = tl.dot(qe, kt, a_qk, input_precision=PRECISION)
                if RULE == DELTA:
                    k_reads = kb * reads
                    tl.store(w + wide, (-k_reads * to_start).to(kind), mask=fits)
                    a_rk = tl.dot(k_reads.to(kind), kt, a_rk, input_precision=PRECISION)
                if RULE == ERASE:
                    r_reads = rb * reads_before
                    tl.store(w + wide, (r_reads * to_start).to(kind), mask=fits)
                    tl.store(write_faded + wide, (wb * to_end).to(kind), mask=fits)
                    wt = tl.trans((wb * writes).to(kind))
                    re = r_reads.to(kind)
                    a_rk = tl.dot(re, kt, a_rk, input_precision=PRECISION)
                    a_qw = tl.dot(qe, wt, a_qw, input_precision=PRECISION)
                    a_rw = tl.dot(re, wt, a_rw, input_precision=PRECISION)
            else:
                m = C // 2
                while m >= NEAR:
                    x = from_middle(a, rows, m, kind)
                    meet = distant(rows, m, True)
                    reads = tl.exp2(-tl.abs(x))
                    reads_before = reads
                    if BEFORE or RULE == ERASE:
                        reads_before = tl.exp2(-tl.abs(x - a))
                    kt = tl.trans((kb * reads).to(kind))
                    qe = (qb * (reads_before if BEFORE else reads)).to(kind)
                    a_qk += tl.where(meet, tl.dot(qe, kt, input_precision=PRECISION), 0.0)
                    if RULE == DELTA:
                        a_rk += tl.where(meet, tl.dot((kb * reads).to(kind), kt, input_precision=PRECISION), 0.0)
                    if RULE == ERASE:
                        wt = tl.trans((wb * reads).to(kind))
                        re = (rb * reads_before).to(kind)
                        a_rk += tl.where(meet, tl.dot(re, kt, input_precision=PRECISION), 0.0)
                        a_qw += tl.where(meet, tl.dot(qe, wt, input_precision=PRECISION), 0.0)
                        a_rw += tl.where(meet, tl.dot(re, wt, input_precision=PRECISION), 0.0)
                    m = m // 2
                between = tl.zeros([C, BK], tl.float32)
                for distance in range(1, NEAR):
                    pick = rows[:, None] - rows[None, :] == distance
                    time_before = time - distance
                    there = (rows >= distance)[:, None] & inside
                    reads = tl.exp2(between + a)
                    reads_before = tl.exp2(between)
                    kd = tl.load(k + time_before[:, None] * k_token + shared * k_head + channels[None, :], mask=there, other=0.0)
                    kd = kd.to(tl.float32)
                    a_qk += tl.where(pick, tl.sum(qb * (reads_before if BEFORE else reads) * kd, 1)[:, None], 0.0)
                    if RULE == DELTA:
                        a_rk += tl.where(pick, tl.sum(kb * reads * kd, 1)[:, None], 0.0)
                    if RULE == ERASE:
                        at = write + time_before[:, None] * write_token + head * write_head + channels[None, :]
                        wd = tl.load(at, mask=there, other=0.0).to(tl.float32)
                        a_rk += tl.where(pick, tl.sum(rb * reads_before * kd, 1)[:, None], 0.0)
                        a_qw += tl.where(pick, tl.sum(qb * reads * wd, 1)[:, None], 0.0)
                        a_rw += tl.where(pick, tl.sum(rb * reads_before * wd, 1)[:, None], 0.0)
                    d = tl.load(decay + time_before[:, None] * decay_token + head * decay_head + channels[None, :], mask=there, other=0.0)
                    between += orders(d)
        else:
            qe = qb.to(kind)
            kt = tl.trans(kb.to(kind))
            a_qk += tl.dot(qe, kt, input_precision=PRECISION)
            if RULE == DELTA:
                a_rk += tl.dot(kb.to(kind), kt, input_precision=PRECISION)
            if RULE == ERASE:
                re = rb.to(kind)
                wt = tl.trans(wb.to(kind))
                a_rk += tl.dot(re, kt, input_precision=PRECISION)
                a_qw += tl.dot(qe, wt, input_precision=PRECISION)
                a_rw += tl.dot(re, wt, input_precision=PRECISION)
        if BEFORE:
            u = tl.load(bonus + head * K + channels, mask=channels < K, other=0.0).to(tl.float32)
            own += tl.sum(qb.to(tl.float32) * kb.to(tl.float32) * u[None, :], 1)
        elif DECAY == CHANNEL and not SETTLED:
            own += tl.sum(qb.to(tl.float32) * kb.to(tl.float32), 1)
            if RULE == ERASE:
                own_w += tl.sum(qb.to(tl.float32) * wb.to(tl.float32), 1)

    if DECAY == CHANNEL and SETTLED:
        settled = tl.max(far, 0) <= within_range(kind)
        tl.store(done + place, settled.to(tl.int32))
        if not settled:
            return
    if DECAY == CHANNEL and not SETTLED:
        a_qk += tl.where(diagonal, own[:, None], 0.0)
        a_qw += tl.where(diagonal, own_w[:, None], 0.0)
    else:
        if DECAY == HEAD:
            between = weight(total_steps[:, None] - total_steps[None, :], BITS)
            between_before = weight((total_steps - steps)[:, None] - total_steps[None, :], BITS)
            a_qk *= between_before if BEFORE else between
            a_qw *= between
            a_rk *= between_before if RULE == ERASE else between
            a_rw *= between_before
        if BEFORE:
            a_qk = tl.where(later, a_qk, tl.where(diagonal, own[:, None], 0.0))
        else:
            a_qk = tl.where(later | diagonal, a_qk, 0.0)
            a_qw = tl.where(later | diagonal, a_qw, 0.0)
        a_rk = tl.where(later, a_rk, 0.0)
        a_rw = tl.where(later, a_rw, 0.0)

    square = place * (C * C) + rows[:, None] * C + rows[None, :]
    tl.store(p + square, (a_qk * scale).to(kind))
    if RULE == DELTA:
        strength = tl.load(beta + time * beta_token + head * beta_head, mask=valid, other=0.0).to(tl.float32)
        strength = away_from_zero(strength)
        t = inverse(-a_rk * strength[:, None], rows, PRECISION) * strength[None, :]
        tl.store(b + square, t.to(kind))
    if RULE == ERASE:
        t = inverse(a_rw, rows, PRECISION)
        tl.store(p_write + square, (a_qw * scale).to(kind))
        tl.store(t_inverse + square, t.to(kind))
        tl.store(b + square, tl.dot(t, a_rk, input_precision=PRECISION).to(kind))

    if DECAY == CHANNEL and SETTLED:
        if RULE != PLAIN:
            tl.debug_barrier()  # written values are read by other threads
            for block in range(0, K, BK):
                channels = block + tl.arange(0, BK)
                wide = place * (C * K) + rows[:, None] * K + channels[None, :]
                fits = (channels < K)[None, :] & (rows >= 0)[:, None]
                seen = tl.load(w + wide, mask=fits, other=0.0)
                seen = tl.dot(t.to(kind), seen, input_precision=PRECISION)
                tl.debug_barrier()  # the memory is overwritten by other threads than have read it
                tl.store(w + wide, seen.to(kind), mask=fits)
    elif w is not None or DECAY == CHANNEL:
        for block in range(0, K, BK):
            channels = block + tl.arange(0, BK)
            inside = valid[:, None] & (channels < K)[None, :]
            kb = tl.load(k + time[:, None] * k_token + shared * k_head + channels[None, :], mask=inside, other=0.0)
            wide = place * (C * K) + rows[:, None] * K + channels[None, :]
            fits = (channels < K)[None, :] & (rows >= 0)[:, None]
            if DECAY == CHANNEL:
                d = tl.load(decay + time[:, None] * decay_token + head * decay_head + channels[None, :], mask=inside, other=0.0)
                a = orders(d)
                to_here = tl.exp2(sums(rows[:, None] >= rows[None, :], a, kind))
                to_before = to_here
                if BEFORE or RULE == ERASE:
                    to_before = tl.exp2(sums(rows[:, None] > rows[None, :], a, kind))
                to_end = tl.exp2(sums(rows[:, None] < rows[None, :], a, kind))
                total = tl.exp2(tl.sum(a, 0))
                tl.store(fade + place * K + channels, total, mask=channels < K)
                qb = tl.load(q + time[:, None] * q_token + shared * q_head + channels[None, :], mask=inside, other=0.0)
                tl.store(q_faded + wide, (qb * scale * (to_before if BEFORE else to_here)).to(kind), mask=fits)
                tl.store(k_faded + wide, (kb * to_end).to(kind), mask=fits)
                if RULE == ERASE:
                    wb = tl.load(write + time[:, None] * write_token + head * write_head + channels[None, :], mask=inside, other=0.0)
                    tl.store(write_faded + wide, (wb * to_end).to(kind), mask=fits)
            elif DECAY == HEAD:
                to_before = weight(total_steps - steps, BITS)[:, None]
            if RULE == DELTA:
                seen = (-kb * to_here).to(kind)
                tl.store(w + wide, tl.dot(t.to(kind), seen, input_precision=PRECISION).to(kind), mask=fits)
            if RULE == ERASE:
                rb = tl.load(read + time[:, None] * read_token + head * read_head + channels[None, :], mask=inside, other=0.0)
                seen = (rb * to_before).to(kind) if DECAY > 0 else rb.to(kind)
                tl.store(w + wide, tl.dot(t.to(kind), seen, input_precision=PRECISION).to(kind), mask=fits)


@triton.jit
def away_from_zero(beta):
    """β with values near 0 moved to 1e-9, which changes no output, so that written values can be divided by it."""
    small = tl.where(beta < 0, -1e-9, 1e-9)
    return tl.where(tl.abs(beta) < 1e-9, small, beta)
