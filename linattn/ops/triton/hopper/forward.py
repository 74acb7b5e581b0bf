"""``scan.forward`` for Hopper, in Gluon: TMA loads, the state in the registers of wgmma.

The state is held transposed, Sᵀ [V, K] in float32 accumulators, one warpgroup for every 64 of V: Sᵀ rounded to bfloat16 is then the
left operand of every product that reads it, directly from registers, and the warpgroups never wait for each other. In this form

    plain    Oᵀ = SᵀQᵀ + VᵀPᵀ             S'ᵀ = λ Sᵀ + VᵀK
    delta    Eᵀ = (Vᵀ - SᵀKᵀ) Bᵀ          Oᵀ = SᵀQᵀ + EᵀPᵀ             S'ᵀ = λ Sᵀ + EᵀK
    erase    Uᵀ = VᵀBᵀ + SᵀWᵀ             Oᵀ = SᵀQᵀ + VᵀPᵀ + UᵀP_wᵀ    S'ᵀ = λ Sᵀ + VᵀK + UᵀK_w

with keys and queries decayed where they meet the state. With a decay per channel the decay applies to K, not to the
product: the delta rule then computes Eᵀ = VᵀBᵀ + SᵀWᵀ. Beside the state's warpgroups one warp loads chunks ahead, one stores, one
turns decays into weights, and a further warpgroup forms P if it is not prepared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import beside, decayed, prepared
from linattn.ops.triton.hopper.common import (
    M,
    add,
    barriers,
    buffer,
    described,
    first_slot,
    locate,
    numbers,
    reach,
    reach_by_decay,
    weight,
    whole,
)
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import C, in_rows
from linattn.ops.triton.tiles import CHANNEL, DELTA, ERASE, HEAD, LOG2E, PLAIN


class Shape(NamedTuple):
    """Constants."""

    K: Any
    DECAY: Any
    RULE: Any
    BEFORE: Any
    BITS: Any
    LOCAL: Any
    OUTPUT: Any
    KEEP: Any
    TURNED: Any
    MEETS: Any  # True if P is formed here
    PARTS: Any  # warpgroups that share the values
    STAGES: Any
    BYTES: Any  # bytes of a stage


@gluon.jit
def load(full, empty, sources, buffers, values, steps, count, shape):
    """Load the operands of chunk after chunk; ``steps`` are the rows between chunks of k, q and write, and of prepared tensors."""
    vd, vb, v_row = values
    for i in range(count):
        stage = i % shape.STAGES
        here = full.index(stage)
        mbarrier.wait(empty.index(stage), (i // shape.STAGES & 1) ^ 1)
        mbarrier.expect(here, shape.BYTES)
        for n in gl.static_range(7):
            if sources[n] is not None:
                row = i * (steps[0] if n < 3 else steps[1])
                tma.load(sources[n], [row, 0], here, buffers[n].index(stage))
        for part in gl.static_range(shape.PARTS):
            tma.load(vd, [v_row + i * C, part * M], here, vb.index(stage * shape.PARTS + part))


@gluon.jit
def store(ready, free, outs, step, count, shape):
    """Store the results of the warpgroups, 64 columns each: outputs or values, and the states before each chunk."""
    od, ob, sd, sb, late = outs
    for i in range(count):
        if sd is not None:
            for part in gl.static_range(shape.PARTS):
                mbarrier.wait(ready.index(shape.PARTS + part), i & 1)
                if late is None:
                    tma.store(sd, [i * step, part * M], sb.index(part))
                else:
                    tma.store(sd, [i * C, part * M], in_rows(sb, C, M).index(2 * part))
                    tma.store(late, [i * C, part * M], in_rows(sb, C, M).index(2 * part + 1))
            tma.store_wait(0)
            for part in gl.static_range(shape.PARTS):
                mbarrier.arrive(free.index(shape.PARTS + part), count=1)
        if od is not None:
            for part in gl.static_range(shape.PARTS):
                mbarrier.wait(ready.index(part), i & 1)
                tma.store(od, [i * C, part * M], ob.index(part))
            tma.store_wait(0)
            for part in gl.static_range(shape.PARTS):
                mbarrier.arrive(free.index(part), count=1)


@gluon.jit
def weigh(full, empty, weights, source, step, rows, count, scale, total, shape):
    """Turn decays into weights, chunk after chunk; writes the decay of the whole segment to ``total`` [K].

    Per head: the decay from the start up to each token (for queries times the scale), from each token to the end, and of the whole
    chunk. Per channel only the last is loaded, the others have been applied by prepare.
    """
    to_here, to_read, to_end, passed, fade = weights
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    channels = gl.arange(0, shape.K, layout)
    if shape.DECAY > 0:
        whole_fade = gl.full([shape.K], 1.0, gl.float32, layout)
        for i in range(count):
            stage = i % shape.STAGES
            if shape.DECAY == CHANNEL:
                faded = gl.load(source + i.to(gl.int64) * step + channels)  # type: ignore[attr-defined]  # a tensor in a kernel
                whole_fade *= faded
            else:
                token = i * C + gl.arange(0, C, layout)
                d = gl.load(source + token.to(gl.int64) * step, mask=token < rows, other=0.0).to(gl.float32)
                steps = whole(d, shape.BITS)
                sums = gl.associative_scan(steps, 0, add)
                all_steps = gl.sum(steps, 0)
                fades = gl.exp2(gl.sum(d, 0) * LOG2E)
                faded = gl.full([1], fades, gl.float32, layout)
                whole_fade *= fades
            mbarrier.wait(empty.index(stage), (i // shape.STAGES & 1) ^ 1)
            if shape.DECAY == HEAD:
                to_here.index(stage).store(weight(sums, shape.BITS))
                to_read.index(stage).store(weight(sums - steps if shape.BEFORE else sums, shape.BITS) * scale)
                to_end.index(stage).store(weight(all_steps - sums, shape.BITS))
                passed.index(stage).store(sums)
            fade.index(stage).store(faded)
            mbarrier.arrive(full.index(stage), count=1)
        if total is not None:
            gl.store(total + channels, whole_fade)


@gluon.jit
def meet(full, made, empty, qb, kb, pb, passed, scale, count, shape):
    """Form P, the masked and decayed products of queries and keys, if it is not prepared."""
    if shape.MEETS:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
        queries: gl.constexpr = gl.SliceLayout(1, layout)
        keys: gl.constexpr = gl.SliceLayout(0, layout)
        visible = gl.arange(0, C, queries)[:, None] >= gl.arange(0, C, keys)[None, :]
        for i in range(count):
            stage = i % shape.STAGES
            mbarrier.wait(full.index(stage), i // shape.STAGES & 1)
            p = gl.zeros([C, C], gl.float32, layout)
            p = warpgroup_mma(qb.index(stage), kb.index(stage).permute((1, 0)), p, use_acc=False, is_async=True)
            if shape.DECAY == HEAD:
                between = passed.index(stage).load(queries)[:, None] - passed.index(stage).load(keys)[None, :]
                factor = weight(between, shape.BITS) * scale
            else:
                factor = scale
            p = warpgroup_mma_wait(0, deps=[p])
            pb.index(stage).store(gl.where(visible, p * factor, 0.0).to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(made.index(stage), count=1)
            mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def hand_over(x, out, ready, free, i):
    """Pass ``x`` [64, ...] to the warp that stores, once it has stored that of the last chunk."""
    mbarrier.wait(free, (i & 1) ^ 1)
    out.permute((1, 0)).store(x)
    fence_async_shared()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def scan(part: gl.constexpr, bars, buffers, staged, weights, ends, scale, count, shape):
    """Scan 64 columns of the state through ``count`` chunks."""
    along_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    along_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.K, 16])
    left_of_c: gl.constexpr = gl.DotOperandLayout(0, along_c, 2)
    left_of_k: gl.constexpr = gl.DotOperandLayout(0, along_k, 2)
    of_tokens: gl.constexpr = gl.SliceLayout(0, along_c)
    of_channels: gl.constexpr = gl.SliceLayout(0, along_k)
    full, empty, made, ready, free = bars
    vb, ob, sb = staged
    kb, qb, ub, wb, bb, pb, xb = buffers
    to_here, to_read, to_end, _, fade = weights
    start, end, finishes, width, identity, first_column = ends
    nothing = gl.zeros([M, C], gl.float32, along_c)
    columns = first_column + part * M + gl.arange(0, M, gl.SliceLayout(1, along_k))
    channels = gl.arange(0, shape.K, of_channels)
    if shape.LOCAL:
        s = gl.where(identity & (channels[None, :] == columns[:, None]), 1.0, 0.0)
    elif start is not None:
        s = gl.load(
            start + (channels[None, :] + columns[:, None] * shape.K if shape.TURNED else channels[None, :] * width + columns[:, None])
        )
    else:
        s = gl.zeros([M, shape.K], gl.float32, along_k)

    for i in range(count):
        stage = i % shape.STAGES
        mbarrier.wait(full.index(stage), i // shape.STAGES & 1)
        v = vb.index(stage * shape.PARTS + part).permute((1, 0))
        rounded = s.to(gl.bfloat16)
        if shape.KEEP:
            hand_over(rounded, sb.index(part), ready.index(shape.PARTS + part), free.index(shape.PARTS + part), i)
        low = gl.convert_layout(rounded, left_of_c)

        if wb is not None:
            e = warpgroup_mma(low, wb.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            e = warpgroup_mma(v, bb.index(stage).permute((1, 0)), e, is_async=True)
        elif shape.RULE == DELTA:
            seen = warpgroup_mma(low, kb.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if shape.OUTPUT:
            out = warpgroup_mma(low, qb.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if shape.RULE == DELTA and wb is None:
            seen = warpgroup_mma_wait(1 if shape.OUTPUT else 0, deps=[seen])
            if shape.DECAY == HEAD:
                seen = seen * to_here.index(stage).load(of_tokens)[None, :]
            change = (v.load(along_c).to(gl.float32) - seen).to(gl.bfloat16)
            e = warpgroup_mma(gl.convert_layout(change, left_of_c), bb.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)

        if shape.OUTPUT:
            if shape.RULE == PLAIN:
                out = warpgroup_mma_wait(0, deps=[out])
            else:
                out, e = warpgroup_mma_wait(0, deps=[out, e])
            if shape.DECAY == HEAD:
                out = out * to_read.index(stage).load(of_tokens)[None, :]
            elif shape.DECAY != CHANNEL:
                out = out * scale
            p = pb.index(stage).permute((1, 0))
            if shape.MEETS:
                mbarrier.wait(made.index(stage), i // shape.STAGES & 1)
            if shape.RULE != DELTA:
                out = warpgroup_mma(v, p, out, is_async=True)
            if shape.RULE != PLAIN:
                read_by = xb.index(stage).permute((1, 0)) if shape.RULE == ERASE else p
                out = warpgroup_mma(gl.convert_layout(e.to(gl.bfloat16), left_of_c), read_by, out, is_async=True)
        elif shape.RULE != PLAIN:
            e = warpgroup_mma_wait(0, deps=[e])
            if shape.KEEP:
                hand_over(e.to(gl.bfloat16), ob.index(part), ready.index(part), free.index(part), i)

        if shape.DECAY > 0:
            s = s * fade.index(stage).load(of_channels)[None, :]
        if shape.RULE != DELTA:
            if shape.DECAY == HEAD:
                written = v.load(along_c).to(gl.float32) * to_end.index(stage).load(of_tokens)[None, :]
                s = warpgroup_mma(gl.convert_layout(written.to(gl.bfloat16), left_of_k), kb.index(stage), s, is_async=True)
            else:
                s = warpgroup_mma(v, kb.index(stage), s, is_async=True)
        if shape.RULE != PLAIN:
            if shape.DECAY == HEAD:
                e = e * to_end.index(stage).load(of_tokens)[None, :]
            key = (ub if shape.RULE == ERASE else kb).index(stage)
            s = warpgroup_mma(gl.convert_layout(e.to(gl.bfloat16), left_of_k), key, s, is_async=True)
        if shape.OUTPUT:
            out = warpgroup_mma_wait(2 if shape.RULE == ERASE else 1, deps=[out])
            hand_over(out.to(gl.bfloat16), ob.index(part), ready.index(part), free.index(part), i)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(empty.index(stage), count=1)

    if end is not None:
        if finishes:
            width = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [width], gl.int32, False, 1)  # addresses anew, or they spill
            gl.store(end + channels[None, :] * width + columns[:, None], s)


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
            near = reach_by_decay(decay + first.to(gl.int64) * decay_token + head * decay_head, decay_token, last - first, True)
            first += (last - first - near) // C * C
        elif LOCAL and DECAY == HEAD and fade is not None:
            count = (last - first + C - 1) // C
            slots = (first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C).to(gl.int64) * heads + head
            near, vanishes = reach(fade + slots, heads, count, True)
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
            else:  # in rows, early keys in the memory of ``o``
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
