"""``state_scan.forward`` for Hopper, in Gluon: TMA loads, the state in the registers of wgmma.

The state is held transposed, Sᵀ [V, K] in float32 accumulators, one warpgroup for every 64 of V: Sᵀ rounded to bfloat16 is then the
left operand of every product that reads it, directly from registers, and the warpgroups never synchronise. In this form

    plain    Oᵀ = SᵀQᵀ + VᵀPᵀ             S'ᵀ = λ Sᵀ + VᵀK
    delta    Eᵀ = (Vᵀ - SᵀKᵀ) Bᵀ          Oᵀ = SᵀQᵀ + EᵀPᵀ             S'ᵀ = λ Sᵀ + EᵀK
    erase    Uᵀ = VᵀBᵀ + SᵀWᵀ             Oᵀ = SᵀQᵀ + VᵀPᵀ + UᵀP_wᵀ    S'ᵀ = λ Sᵀ + VᵀK + UᵀK_w

with queries decayed from the start of the chunk and keys to its end. With a decay per channel the decay applies to K, not to the
product: the delta rule then computes Eᵀ = VᵀBᵀ + SᵀWᵀ. Beside the state's warpgroups one warp prefetches chunks, one stores, one
turns decays into weights, and a further warpgroup computes P if it is not prepared.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper.chunks import beside, decayed, prepared
from linattn.ops.triton.hopper.common import M, barriers, buffer, described, first_slot, locate, numbers, reach
from linattn.ops.triton.hopper.forward_warps import Shape, load, meet, scan, store, weigh
from linattn.ops.triton.hopper.names import fence_async_shared
from linattn.ops.triton.tiles import CHANNEL, DELTA, ERASE, HEAD, LOG2E, PLAIN


@gluon.jit
def specialize(bars, sources, buffers, values, outs, weights, decays, ends, steps, scale, count, shape, REGISTERS: gl.constexpr):
    """Start the warps: one warpgroup or two for the state, and the helping warps."""
    full, empty, made, ready, free = bars
    vb, ob, sb = values[1], outs[1], outs[3]
    weighed, step, rows, fade_to = decays
    MEETS: gl.constexpr = shape.MEETS
    if shape.PARTS == 2:
        gl.warp_specialize([
            (scan, (0, bars, buffers, (vb, ob, sb), weights, ends, scale, count, shape)),
            (scan, (1, bars, buffers, (vb, ob, sb), weights, ends, scale, count, shape)),
            (meet, (full, made, empty, buffers[1], buffers[0], buffers[5], weights[3], scale, count, shape)),
            (load, (full, empty, sources, buffers, values, steps, count, shape)),
            (store, (ready, free, outs, steps[2], count, shape)),
            (weigh, (full, empty, weights, weighed, step, rows, count, scale, fade_to, shape)),
        ], [4, 4 if MEETS else 1, 1, 1, 1], [REGISTERS, 104 if MEETS else 24, 24, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (scan, (0, bars, buffers, (vb, ob, sb), weights, ends, scale, count, shape)),
            (meet, (full, made, empty, buffers[1], buffers[0], buffers[5], weights[3], scale, count, shape)),
            (load, (full, empty, sources, buffers, values, steps, count, shape)),
            (store, (ready, free, outs, steps[2], count, shape)),
            (weigh, (full, empty, weights, weighed, step, rows, count, scale, fade_to, shape)),
        ], [4 if MEETS else 1, 1, 1, 1], [REGISTERS if MEETS else 24, 24, 24, 24])  # fmt: skip


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "write_token", "write_head", "decay_token", "decay_head",
    "sequences", "tokens", "heads", "group", "slots_before", "length",
])  # fmt: skip
def forward(
    q, k, v, write, decay, cu, p, p_write, b, w, q_faded, k_faded, write_faded, fade,
    starts, o, values, states, final, transition, total,
    q_token, q_head, k_token, k_head, v_token, v_head, write_token, write_head, decay_token, decay_head,
    sequences, tokens, heads, group, scale, slots_before, length,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr,
    BEFORE: gl.constexpr, PACKED: gl.constexpr, BITS: gl.constexpr, PRECISION: gl.constexpr,
    kind: gl.constexpr, LOCAL: gl.constexpr, EVERY: gl.constexpr, OUTPUT: gl.constexpr, KEEP: gl.constexpr, START: gl.constexpr,
    TURNED: gl.constexpr, FINAL: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    slot = gl.program_id(1) + slots_before
    head = gl.program_id(2)
    n, first, last, index, begin, stop = locate(slot, cu, sequences, tokens, length, PACKED)
    alive = first < last
    finishes = last >= stop
    if LOCAL:
        if not EVERY:
            alive = alive & (last < stop)  # no segment starts from the end of the last one
    elif FINAL:
        alive = alive | (index == 0)
    if alive:
        PARTS: gl.constexpr = BV // M
        BLOCKS: gl.constexpr = V // BV
        block = gl.program_id(0)
        identity = block >= BLOCKS  # only LOCAL and only where the rule erases
        first_column = (block - gl.where(identity, BLOCKS, 0)) * BV
        v_column = gl.where(identity, 0, first_column)
        if LOCAL and DECAY == HEAD and RULE == PLAIN:  # the state at the end depends on the last chunks only
            near = reach(decay + first.to(gl.int64) * decay_token + head * decay_head, decay_token, last - first, True, LOG2E, False, 8)[0]
            first += (last - first - near) // C * C
        elif LOCAL and DECAY == HEAD and fade is not None:
            count = (last - first + C - 1) // C
            slots = (first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C).to(gl.int64) * heads + head
            near, vanishes = reach(fade + slots, heads, count, True, 1.0, True, 1)
            first = gl.where(identity & vanishes, last, first + (count - near) * C)
        rows = last - first
        count = (rows + C - 1) // C
        place = (first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C).to(gl.int64) * heads + head
        tile_step = heads * C
        tile_rows = count * tile_step
        time = first.to(gl.int64)
        MEETS: gl.constexpr = OUTPUT and RULE == PLAIN and DECAY != CHANNEL and not BEFORE
        READS_W: gl.constexpr = RULE == ERASE or (RULE == DELTA and DECAY == CHANNEL)
        IN_ROWS: gl.constexpr = RULE == DELTA and DECAY != CHANNEL
        at_token = time * heads + head

        # Tiles of a chunk: k, q, write; w, b, p, p_write.
        raw_step = tile_step if DECAY == CHANNEL else C
        qd, ud, wd, bd, pd, xd = None, None, None, None, None, None
        qb, ub, wb, bb, pb, xb = None, None, None, None, None, None
        kd = decayed(k_faded, place, tile_rows, k, time, k_token, head // group * k_head, rows, C, K, DECAY)
        kb = buffer(STAGES, C, K)
        if OUTPUT:
            qd = decayed(q_faded, place, tile_rows, q, time, q_token, head // group * q_head, rows, C, K, DECAY)
            qb, pb = buffer(STAGES, C, K), buffer(STAGES, C, C)
            if not MEETS:
                pd = beside(p, 0, at_token, rows, heads, C) if IN_ROWS else prepared(p, place, tile_rows, C, C)
        if READS_W:
            wd, wb = prepared(w, place, tile_rows, C, K), buffer(STAGES, C, K)
        if RULE != PLAIN:
            bd = beside(b, C, at_token, rows, heads, C) if IN_ROWS else prepared(b, place, tile_rows, C, C)
            bb = buffer(STAGES, C, C)
        if RULE == ERASE:
            ud = decayed(write_faded, place, tile_rows, write, time, write_token, head * write_head, rows, C, K, DECAY)
            ub = buffer(STAGES, C, K)
            if OUTPUT:
                xd, xb = prepared(p_write, place, tile_rows, C, C), buffer(STAGES, C, C)
        sources, buffers = (kd, qd, ud, wd, bd, pd, xd), (kb, qb, ub, wb, bb, pb, xb)
        vd = described(v + time * v_token + head * v_head + v_column, rows, v_token, BV, C, M)
        vb = buffer(STAGES * PARTS, C, M)
        WIDE: gl.constexpr = 1 + OUTPUT + (RULE == ERASE) + READS_W
        SQUARE: gl.constexpr = (RULE != PLAIN) + (OUTPUT and not MEETS) + (OUTPUT and RULE == ERASE)
        BYTES: gl.constexpr = 2 * C * (WIDE * K + SQUARE * C + BV)

        od, ob, sd, sb, late = None, None, None, None, None
        if OUTPUT or (KEEP and RULE != PLAIN):
            od = described((o if OUTPUT else values) + (time * heads + head) * V + first_column, rows, heads * V, BV, C, M)
            ob = buffer(PARTS, C, M)
        if KEEP:
            sb = buffer(PARTS, K, M)
            if OUTPUT or o is None:
                sd = described(states + place * K * V + first_column, count * heads * K, V, BV, K, M)
            else:  # in rows; early keys alias ``o``
                sd = described(o + at_token * V, rows, heads * V, V, C, M)
                late = described(states + at_token * V, rows, heads * V, V, C, M)

        to_here, to_read, to_end, passed = None, None, None, None
        faded, weighed, step = None, None, 0
        if DECAY == HEAD:
            to_here, to_read, to_end = numbers(STAGES, C, gl.float32), numbers(STAGES, C, gl.float32), numbers(STAGES, C, gl.float32)
            passed, faded = numbers(STAGES, C, gl.int32), numbers(STAGES, 1, gl.float32)
            weighed = decay + time * decay_token + head * decay_head
            step = decay_token
        elif DECAY == CHANNEL:
            faded = numbers(STAGES, K, gl.float32)
            weighed = fade + place * K
            step = heads * K
        weights = (to_here, to_read, to_end, passed, faded)

        full, empty = barriers(STAGES, 1 + (DECAY > 0)), barriers(STAGES, PARTS + MEETS)
        made, ready, free = None, None, None  # see ``barriers``
        if MEETS:
            made = barriers(STAGES, 1)
        if OUTPUT or KEEP:
            ready, free = barriers(2 * PARTS, 1), barriers(2 * PARTS, 1)
        fence_async_shared()

        start, end, width, fade_to = None, None, V, None
        at = slot.to(gl.int64) * heads + head
        if LOCAL:
            finishes = True
            end = starts + at * K * V
            if RULE == PLAIN:
                fade_to = total + at * K
            else:
                width = gl.where(identity, K, V)
                end = gl.where(identity, transition + at * K * K, end)
        else:
            if START:
                start = starts + at * K * V
            if FINAL:
                end = final + (n.to(gl.int64) * heads + head) * K * V
        v_row = gl.where(identity, tile_rows, 0)  # past the end: zeros
        specialize(
            (full, empty, made, ready, free), sources, buffers, (vd, vb, v_row), (od, ob, sd, sb, late), weights,
            (weighed, step, rows, fade_to), (start, end, finishes, width, identity & (count > 0), first_column),
            (raw_step, C if IN_ROWS else tile_step, heads * K), scale, count,
            Shape(K, DECAY, RULE, BEFORE, BITS, LOCAL, OUTPUT, KEEP, TURNED, MEETS, PARTS, STAGES, BYTES), REGISTERS,
        )  # fmt: skip
