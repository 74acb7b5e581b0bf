"""Parts of a chunk that do not depend on the state: masked products of queries and keys, the triangular inverse, decayed operands.

One program per chunk and head, all chunks in parallel. With e_i the value that the rule writes for token i, the scans then compute

    plain    e = v                                  o = Q S + P v
    delta    e = B v + W S    (B = T diag β)        o = Q S + P e
    erase    u = B v + W S    (T = (I - A_rw)^-1)   o = Q S + P v + P_w u

with S the state before the chunk, and S' = λ S + Kᵀ e (+ K_wᵀ u) the one after it. Q, K and K_w stand for decayed queries and
keys: with a decay per head the scans scale rows themselves, with one per channel this kernel writes them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linattn.ops.triton.anchors import apart, from_anchor, in_range, orders_of_halves, to_edge, to_late_anchor
from linattn.ops.triton.decays import keep_factors
from linattn.ops.triton.tiles import (
    CHANNEL,
    DELTA,
    ERASE,
    HEAD,
    NEAR,
    PLAIN,
    chunk_slots,
    distant,
    first_left,
    from_middle,
    inverse,
    locate,
    orders,
    sums,
    weight,
    whole,
)


class Shape(NamedTuple):
    """Constants."""

    K: Any
    C: Any
    BK: Any
    DECAY: Any
    RULE: Any
    BEFORE: Any
    BITS: Any
    PRECISION: Any
    kind: Any
    ANCHORS: Any
    W: Any  # True if products with the state are stored


@triton.constexpr_function
def shape_of(*constants: Any) -> Shape:
    return Shape(*constants)


@triton.jit(do_not_specialize=["sequences", "tokens", "scale"])
def prepare(
    q, k, v, read, write, decay, beta, bonus, cu,
    p, p_write, b, t_inverse, w, q_faded, k_faded, write_faded, fade, done,
    q_token, q_head, k_token, k_head, read_token, read_head, write_token, write_head, decay_token, decay_head, beta_token, beta_head,
    sequences, tokens, heads, group, scale,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DECAY: tl.constexpr, RULE: tl.constexpr, BEFORE: tl.constexpr,
    PACKED: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr,
    kind: tl.constexpr, ANCHORS: tl.constexpr,
):  # fmt: skip
    """With a decay per channel a launch for one anchor and one for two (``ANCHORS``) compute the chunks with decays in their range and mark
    them in ``done`` [chunks, H]; another (0) computes the rest, as tiles.py says. All but the first have few programs, which look for
    what is left, since one for each chunk would take long to find nothing.
    """
    tensors = ((q, k, read, write, decay, beta, bonus), (p, p_write, b, t_inverse, w), (q_faded, k_faded, write_faded, fade))
    strides = (
        q_token, q_head, k_token, k_head, read_token, read_head, write_token, write_head, decay_token, decay_head, beta_token, beta_head
    )  # fmt: skip
    shape: tl.constexpr = shape_of(K, C, BK, DECAY, RULE, BEFORE, BITS, PRECISION, kind, ANCHORS, w is not None)
    if ANCHORS == 1:
        slot = tl.program_id(0)
        head = tl.program_id(1)
        _, first, last, _, _, _ = locate(slot, cu, sequences, tokens, C, PACKED)
        if first < last:
            of_chunk(slot, head, first, last, tensors, strides, done, heads, group, scale, shape)
    else:
        items = chunk_slots(sequences, tokens, C, PACKED) * heads
        # Numbers that do not depend on the item are formed again: kept, they would take registers.
        for item in tl.range(first_left(done, items, 1, 1, 1), items, tl.num_programs(0), num_stages=1, disable_licm=True):
            slot = item // heads
            _, first, last, _, _, _ = locate(slot, cu, sequences, tokens, C, PACKED)
            if (first < last) & (tl.load(done + item) == 0):
                of_chunk(slot, item % heads, first, last, tensors, strides, done, heads, group, scale, shape)


@triton.jit
def of_chunk(slot, head, first, last, tensors, strides, done, heads, group, scale, shape: tl.constexpr):
    """Store the parts of a chunk of a head, with decays per channel if they are in range of the anchors."""
    place = slot.to(tl.int64) * heads + head
    if shape.DECAY == CHANNEL and shape.ANCHORS > 0:
        products, steps, settled = multiply(place, head, first, last, tensors, strides, group, scale, shape)
        tl.store(done + place, settled.to(tl.int32))
        if settled:
            finish(place, head, first, last, products, steps, tensors, strides, group, scale, shape)
    else:
        products, steps, _ = multiply(place, head, first, last, tensors, strides, group, scale, shape)
        finish(place, head, first, last, products, steps, tensors, strides, group, scale, shape)


@triton.jit
def multiply(place, head, first, last, tensors, strides, group, scale, shape: tl.constexpr):
    """Masked products [C, C] of queries and keys, qk, rk, qw and rw; decays per head; True if decays are in range of the anchors.

    With anchors also stores scaled queries and keys, and of the delta rule with a decay per head its factors.
    """
    K: tl.constexpr = shape.K
    C: tl.constexpr = shape.C
    BK: tl.constexpr = shape.BK
    DECAY: tl.constexpr = shape.DECAY
    RULE: tl.constexpr = shape.RULE
    BEFORE: tl.constexpr = shape.BEFORE
    BITS: tl.constexpr = shape.BITS
    PRECISION: tl.constexpr = shape.PRECISION
    kind: tl.constexpr = shape.kind
    ANCHORS: tl.constexpr = shape.ANCHORS
    q, k, read, write, decay, beta, bonus = tensors[0]
    w = tensors[1][4]
    q_faded, k_faded, write_faded, fade = tensors[2]
    q_token, q_head, k_token, k_head, read_token, read_head, write_token, write_head = strides[:8]
    decay_token, decay_head, beta_token, beta_head = strides[8:]
    rows = tl.arange(0, C)
    valid = rows < last - first
    time = first.to(tl.int64) + rows
    shared = head // group
    steps = rows
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
    squares = tl.zeros([C], tl.float32)  # of keys
    settled = first < last  # True while all channels are within range of their anchors
    for block in range(0, K, BK):
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
            if ANCHORS > 0:
                halves = orders_of_halves(a, rows)
                settled = settled & in_range(halves, ANCHORS, kind)
                if settled:
                    x = from_anchor(a, rows, ANCHORS, kind)
                    reads = tl.exp2(x)
                    writes = tl.exp2(-x)
                    reads_before = reads
                    if BEFORE or RULE == ERASE:
                        reads_before = tl.exp2(x - a)
                    wide = place * (C * K) + rows[:, None] * K + channels[None, :]
                    fits = (channels < K)[None, :] & (rows >= 0)[:, None]
                    q_reads = qb * (reads_before if BEFORE else reads)
                    k_writes = kb * writes
                    tl.store(q_faded + wide, (to_edge(q_reads, halves, rows, ANCHORS, True) * scale).to(kind), mask=fits)
                    tl.store(k_faded + wide, to_edge(k_writes, halves, rows, ANCHORS, False).to(kind), mask=fits)
                    tl.store(fade + place * K + channels, tl.exp2(halves.early + halves.late), mask=channels < K)
                    qe = q_reads.to(kind)
                    kt = tl.trans(k_writes.to(kind))
                    if RULE == ERASE:
                        r_reads = rb * reads_before
                        w_writes = wb * writes
                        tl.store(w + wide, to_edge(r_reads, halves, rows, ANCHORS, True).to(kind), mask=fits)
                        tl.store(write_faded + wide, to_edge(w_writes, halves, rows, ANCHORS, False).to(kind), mask=fits)
                        re = r_reads.to(kind)
                        wt = tl.trans(w_writes.to(kind))
                    a_qk = paired(a_qk, qe, kt, k_writes, halves, rows, ANCHORS, PRECISION, kind)
                    if RULE == DELTA:
                        k_reads = kb * reads
                        tl.store(w + wide, to_edge(-k_reads, halves, rows, ANCHORS, True).to(kind), mask=fits)
                        a_rk = paired(a_rk, k_reads.to(kind), kt, k_writes, halves, rows, ANCHORS, PRECISION, kind)
                    if RULE == ERASE:
                        a_rk = paired(a_rk, re, kt, k_writes, halves, rows, ANCHORS, PRECISION, kind)
                        a_qw = paired(a_qw, qe, wt, w_writes, halves, rows, ANCHORS, PRECISION, kind)
                        a_rw = paired(a_rw, re, wt, w_writes, halves, rows, ANCHORS, PRECISION, kind)
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
                squares += tl.sum(kb.to(tl.float32) * kb.to(tl.float32), 1)
            if RULE == ERASE:
                re = rb.to(kind)
                wt = tl.trans(wb.to(kind))
                a_rk += tl.dot(re, kt, input_precision=PRECISION)
                a_qw += tl.dot(qe, wt, input_precision=PRECISION)
                a_rw += tl.dot(re, wt, input_precision=PRECISION)
        if BEFORE:
            u = tl.load(bonus + head * K + channels, mask=channels < K, other=0.0).to(tl.float32)
            own += tl.sum(qb.to(tl.float32) * kb.to(tl.float32) * u[None, :], 1)
        elif DECAY == CHANNEL and ANCHORS == 0:
            own += tl.sum(qb.to(tl.float32) * kb.to(tl.float32), 1)
            if RULE == ERASE:
                own_w += tl.sum(qb.to(tl.float32) * wb.to(tl.float32), 1)

    if DECAY == CHANNEL and ANCHORS == 0:
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
            if RULE == DELTA:
                strength = tl.load(beta + time * beta_token + head * beta_head, mask=valid, other=0.0).to(tl.float32)
                keep_factors(fade, place, rows, d, strength, squares, BITS)
        if BEFORE:
            a_qk = tl.where(later, a_qk, tl.where(diagonal, own[:, None], 0.0))
        else:
            a_qk = tl.where(later | diagonal, a_qk, 0.0)
            a_qw = tl.where(later | diagonal, a_qw, 0.0)
        a_rk = tl.where(later, a_rk, 0.0)
        a_rw = tl.where(later, a_rw, 0.0)
    return (a_qk, a_rk, a_qw, a_rw), steps, settled


@triton.jit
def finish(place, head, first, last, products, steps, tensors, strides, group, scale, shape: tl.constexpr):
    """Store products and, of rules that erase, what is solved from them, and decayed operands unless stored before."""
    K: tl.constexpr = shape.K
    C: tl.constexpr = shape.C
    BK: tl.constexpr = shape.BK
    DECAY: tl.constexpr = shape.DECAY
    RULE: tl.constexpr = shape.RULE
    BEFORE: tl.constexpr = shape.BEFORE
    BITS: tl.constexpr = shape.BITS
    PRECISION: tl.constexpr = shape.PRECISION
    kind: tl.constexpr = shape.kind
    ANCHORS: tl.constexpr = shape.ANCHORS
    q, k, read, write, decay, beta, _ = tensors[0]
    p, p_write, b, t_inverse, w = tensors[1]
    q_faded, k_faded, write_faded, fade = tensors[2]
    q_token, q_head, k_token, k_head, read_token, read_head, write_token, write_head = strides[:8]
    decay_token, decay_head, beta_token, beta_head = strides[8:]
    a_qk, a_rk, a_qw, a_rw = products
    rows = tl.arange(0, C)
    valid = rows < last - first
    time = first.to(tl.int64) + rows
    shared = head // group

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

    if DECAY == CHANNEL and ANCHORS > 0:
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
    elif shape.W or DECAY == CHANNEL:
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
                to_before = weight(tl.cumsum(steps, 0) - steps, BITS)[:, None]
            if RULE == DELTA:
                seen = (-kb * to_here).to(kind)
                tl.store(w + wide, tl.dot(t.to(kind), seen, input_precision=PRECISION).to(kind), mask=fits)
            if RULE == ERASE:
                rb = tl.load(read + time[:, None] * read_token + head * read_head + channels[None, :], mask=inside, other=0.0)
                seen = (rb * to_before).to(kind) if DECAY > 0 else rb.to(kind)
                tl.store(w + wide, tl.dot(t.to(kind), seen, input_precision=PRECISION).to(kind), mask=fits)


@triton.jit
def paired(a, reads, keys, writes, halves, rows, ANCHORS: tl.constexpr, PRECISION: tl.constexpr, kind: tl.constexpr):
    """``a`` [C, C] and products of queries and keys scaled to their anchors; late queries meet early keys brought on to theirs."""
    if ANCHORS == 2:
        early_keys = tl.trans(to_late_anchor(writes, halves).to(kind))
        same = tl.dot(reads, keys, input_precision=PRECISION)
        a += tl.where(apart(rows), tl.dot(reads, early_keys, input_precision=PRECISION), same)
    else:
        a = tl.dot(reads, keys, a, input_precision=PRECISION)
    return a


@triton.jit
def away_from_zero(beta):
    """β with values near 0 moved to 1e-9, which changes no output, so that written values can be divided by it."""
    small = tl.where(beta < 0, -1e-9, 1e-9)
    return tl.where(tl.abs(beta) < 1e-9, small, beta)
