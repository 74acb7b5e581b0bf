"""``state_scan.backward`` for Hopper, in Gluon: TMA loads and stores, the state's cotangent in the registers of wgmma.

The cotangent is held transposed, dSᵀ [V, K] in float32 accumulators, one warpgroup for every 64 of V: rounded to bfloat16 it is the
left operand of every product that reads it, directly from registers, and the warpgroups never synchronise. From the last
chunk to the first, with dSᵀ the cotangent of the state after a chunk and dS'ᵀ of the one before it,

    plain    dVᵀ = dSᵀKᵀ + dOᵀP                                             dS'ᵀ = λ dSᵀ + dOᵀQ
    delta    dEᵀ = dSᵀKᵀ + dOᵀP       dVᵀ = dEᵀB                            dS'ᵀ = λ dSᵀ + dOᵀQ - dVᵀK
    erase    dUᵀ = dSᵀK_wᵀ + dOᵀP_w   dVᵀ = dSᵀKᵀ + dOᵀP + dUᵀB   Xᵀ = dUᵀT   dS'ᵀ = λ dSᵀ + dOᵀQ + dUᵀW

with queries decayed from the start of the chunk and keys to its end. With a decay per channel the decay applies to K, not to the
product: the delta rule then adds dEᵀW. One warp prefetches chunks, another the operands needed last, one turns decays into weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.backward_warps import Shape, load, scan, weigh
from linattn.ops.triton.hopper.chunks import beside
from linattn.ops.triton.hopper.common import M, barriers, buffer, described, first_slot, locate, numbers, reach
from linattn.ops.triton.hopper.names import fence_async_shared
from linattn.ops.triton.tiles import CHANNEL, DELTA, ERASE, HEAD, LOG2E, PLAIN


@gluon.jit
def specialize(
    bars, tiles, steps, targets, staging, weights, decays, ends, scale, count, tile_step, shape, REGISTERS: gl.constexpr
):  # fmt: skip
    """Start the warps: one warpgroup or two for the cotangent, and those that load and compute weights for them."""
    full, late, done = bars
    firsts, seconds, sources, late_sources = tiles
    weighed, step, rows = decays
    PARTS: gl.constexpr = shape.PARTS
    gl.warp_specialize([
        (scan, (0, bars, firsts, seconds, targets, staging, weights, ends, scale, count, tile_step, shape)),
        (scan, (1, bars, firsts, seconds, targets, staging, weights, ends, scale, count, tile_step, shape)),
        (load, (full, done, sources, firsts, steps[0], count, 4, shape.BYTES, shape.STAGES, shape.STAGES)),
        (load, (late, done, late_sources, seconds, steps[1], count, 5, shape.LATE_BYTES, shape.LATE, shape.STAGES)),
        (weigh, (full, done, weights, weighed, step, rows, count, scale, shape)),
    ], [4 if PARTS == 2 else 1, 1, 1, 1], [REGISTERS if PARTS == 2 else 24, 24, 24, 24])  # fmt: skip


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "do_token", "do_head", "write_token", "write_head", "decay_token", "decay_head",
    "sequences", "tokens", "heads", "group", "slots_before", "length",
])  # fmt: skip
def backward(
    q, k, write, do, decay, cu, p, p_write, b, t_inverse, w, q_faded, k_faded, write_faded, fade,
    ends, dv, x_read, dstates, dinitial,
    q_token, q_head, k_token, k_head, do_token, do_head, write_token, write_head, decay_token, decay_head,
    sequences, tokens, heads, group, scale, slots_before, length,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr,
    BEFORE: gl.constexpr, PACKED: gl.constexpr, BITS: gl.constexpr, PRECISION: gl.constexpr,
    kind: gl.constexpr, LOCAL: gl.constexpr, START: gl.constexpr, TURNED: gl.constexpr, STAGES: gl.constexpr, LATE: gl.constexpr,
    REGISTERS: gl.constexpr, EVERY: gl.constexpr = False,
):  # fmt: skip
    slot = gl.program_id(1) + slots_before
    head = gl.program_id(2)
    n, first, last, index, begin, _ = locate(slot, cu, sequences, tokens, length, PACKED)
    if LOCAL:
        alive = first < last
        if not EVERY:
            alive = alive & (index > 0)  # no segment ends at the start of the first one
    else:
        alive = (first < last) | (index == 0)
    if alive:
        PARTS: gl.constexpr = BV // M
        READS: gl.constexpr = RULE != PLAIN or not LOCAL  # True if the cotangent before each chunk is read
        MEETS: gl.constexpr = READS and RULE == PLAIN and DECAY != CHANNEL and not BEFORE
        READS_W: gl.constexpr = RULE == ERASE or (RULE == DELTA and DECAY == CHANNEL)
        READS_B: gl.constexpr = RULE != PLAIN and not (LOCAL and READS_W)
        IN_ROWS: gl.constexpr = RULE == DELTA and DECAY != CHANNEL  # P and B lie beside each other
        OWN: gl.constexpr = RULE == ERASE and not LOCAL  # values and erasing writes have different keys
        first_column = gl.program_id(0) * BV
        shared = head // group
        place = (first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C).to(gl.int64) * heads + head
        if LOCAL and DECAY == HEAD and RULE == PLAIN:  # the cotangent at the start depends on the first chunks only
            near = reach(decay + first.to(gl.int64) * decay_token + head * decay_head, decay_token, last - first, False, LOG2E, False, 8)[0]
            last = gl.minimum(last, first + (near + C - 1) // C * C)
        elif LOCAL and DECAY == HEAD and fade is not None:
            near = reach(fade + place, heads, (last - first + C - 1) // C, False, 1.0, True, 1)[0]
            last = gl.minimum(last, first + near * C)
        rows = last - first
        count = (rows + C - 1) // C
        wide = place * C * K
        square = place * C * C
        tile_step = heads * C
        tile_rows = count * tile_step
        time = first.to(gl.int64)
        here = (time * heads + head) * V + first_column

        qd, kd, ud, pd, bd, wd, own_pd, td = None, None, None, None, None, None, None, None
        qb, kb, ub, pb, bb, wb, own_pb, tb = buffer(LATE, C, K), None, None, None, None, None, None, None
        if DECAY == CHANNEL:
            raw_step = tile_step
            qd = described(q_faded + wide, tile_rows, K, K, C, K)
            if READS:
                kd = described(k_faded + wide, tile_rows, K, K, C, K)
            if RULE == ERASE:
                ud = described(write_faded + wide, tile_rows, K, K, C, K)
        else:
            raw_step = C
            qd = described(q + time * q_token + shared * q_head, rows, q_token, K, C, K)
            if READS:
                kd = described(k + time * k_token + shared * k_head, rows, k_token, K, C, K)
            if RULE == ERASE:
                ud = described(write + time * write_token + head * write_head, rows, write_token, K, C, K)
        if READS and RULE != ERASE:
            ud = kd
        dod = described(do + time * do_token + head * do_head + first_column, rows, do_token, BV, C, M)
        dob = buffer(STAGES * PARTS, C, M)
        if READS:
            ub = buffer(STAGES, C, K)
            if IN_ROWS:
                pd = beside(p, 0, time * heads + head, rows, heads, C)
                pb = buffer(STAGES, C, C)
            elif not MEETS:
                pd = described((p_write if RULE == ERASE else p) + square, tile_rows, C, C, C, C)
                pb = buffer(STAGES, C, C)
        if READS_B:
            bd = beside(b, C, time * heads + head, rows, heads, C) if IN_ROWS else described(b + square, tile_rows, C, C, C, C)
            bb = buffer(STAGES, C, C)
        if READS_W:
            wd = described(w + wide, tile_rows, K, K, C, K)
            wb = buffer(LATE, C, K)
        if OWN:
            own_pd = described(p + square, tile_rows, C, C, C, C)
            td = described(t_inverse + square, tile_rows, C, C, C, C)
            kb = buffer(LATE, C, K)
            own_pb = buffer(LATE, C, C)
            tb = buffer(LATE, C, C)
        BYTES: gl.constexpr = 2 * C * (BV + READS * K + (READS and not MEETS) * C + READS_B * C)
        LATE_BYTES: gl.constexpr = 2 * C * (K + READS_W * K + OWN * (K + 2 * C))

        dstates_to, dv_to, x_to = None, None, None
        dstates_at, dv_at, x_at, p_at = None, None, None, None
        if dstates is not None:
            dstates_to = described(dstates + place * K * V + first_column, count * heads * K, V, BV, K, M)
            dstates_at = buffer(PARTS, K, M)
        if not LOCAL:
            dv_to = described(dv + here, rows, heads * V, BV, C, M)
            dv_at = buffer(PARTS, C, M)
        if OWN:
            x_to = described(x_read + here, rows, heads * V, BV, C, M)
            x_at = buffer(PARTS, C, M)
        if MEETS:
            p_at = buffer(PARTS, C, C)

        passed, to_here, to_read, to_end, faded = None, None, None, None, None
        weighed, step = None, 0
        if DECAY == HEAD:
            to_read = numbers(STAGES, C, gl.float32)
            faded = numbers(STAGES, 1, gl.float32)
            if READS:
                to_end = numbers(STAGES, C, gl.float32)
            if RULE == DELTA:
                to_here = numbers(STAGES, C, gl.float32)
            if MEETS:
                passed = numbers(STAGES, C, gl.int32)
            weighed = decay + time * decay_token + head * decay_head
            step = decay_token
        elif DECAY == CHANNEL:
            faded = numbers(STAGES, K, gl.float32)
            weighed = fade + place * K
            step = heads * K

        start, end, finishes = None, None, True
        at = (slot.to(gl.int64) * heads + head) * K * V
        if LOCAL:
            end = ends + at
        else:
            if START:
                start = ends + at
            if dinitial is not None:
                end = dinitial + (n.to(gl.int64) * heads + head) * K * V
            finishes = index == 0

        full = barriers(STAGES, 1 + (DECAY > 0))
        late = barriers(LATE, 1)
        done = barriers(STAGES, PARTS)
        fence_async_shared()
        bars = (full, late, done)
        firsts, seconds = (dob, ub, pb, bb), (qb, wb, kb, own_pb, tb)
        sources, steps = (dod, ud, pd, bd), (C, raw_step, C if IN_ROWS else tile_step, C if IN_ROWS else tile_step)
        late_sources, late_steps = (qd, wd, kd if OWN else None, own_pd, td), (raw_step, tile_step, raw_step, tile_step, tile_step)
        targets, staging = (dstates_to, dv_to, x_to), (dstates_at, dv_at, x_at, p_at)
        weights = (passed, to_here, to_read, to_end, faded)
        edges = (start, end, finishes, V, first_column)
        specialize(
            bars, (firsts, seconds, sources, late_sources), (steps, late_steps), targets, staging, weights, (weighed, step, rows),
            edges, scale, count, tile_step,
            Shape(K, DECAY, RULE, BEFORE, BITS, LOCAL, TURNED, PARTS, STAGES, LATE, BYTES, LATE_BYTES), REGISTERS,
        )  # fmt: skip
