"""``scan.backward`` for Hopper, in Gluon: TMA loads and stores, the state's cotangent in the registers of wgmma.

The cotangent is held transposed, dSᵀ [V, K] in float32 accumulators, one warpgroup for every 64 of V: rounded to bfloat16 it is the
left operand of every product that reads it, directly from registers, and the warpgroups never wait for each other. From the last
chunk to the first, with dSᵀ the cotangent of the state after a chunk and dS'ᵀ of the one before it,

    plain    dVᵀ = dSᵀKᵀ + dOᵀP                                             dS'ᵀ = λ dSᵀ + dOᵀQ
    delta    dEᵀ = dSᵀKᵀ + dOᵀP       dVᵀ = dEᵀB                            dS'ᵀ = λ dSᵀ + dOᵀQ - dVᵀK
    erase    dUᵀ = dSᵀK_wᵀ + dOᵀP_w   dVᵀ = dSᵀKᵀ + dOᵀP + dUᵀB   Xᵀ = dUᵀT   dS'ᵀ = λ dSᵀ + dOᵀQ + dUᵀW

with keys and queries decayed where they meet the state. With a decay per channel the decay applies to K, not to the
product: the delta rule then adds dEᵀW. One warp loads chunks ahead, another the operands needed last, one turns decays into weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import beside
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
from linattn.ops.triton.hopper.operands import C
from linattn.ops.triton.tiles import CHANNEL, DELTA, ERASE, HEAD, LOG2E, NONE, PLAIN


class Shape(NamedTuple):
    """Constants."""

    K: Any
    DECAY: Any
    RULE: Any
    BEFORE: Any
    BITS: Any
    LOCAL: Any
    TURNED: Any
    PARTS: Any  # warpgroups that share the values
    STAGES: Any  # stages of the operands needed first in a chunk, and of the rest
    LATE: Any
    BYTES: Any
    LATE_BYTES: Any


@gluon.jit
def load(full, done, sources, buffers, steps, count, SOURCES: gl.constexpr, BYTES: gl.constexpr, STAGES: gl.constexpr, RING: gl.constexpr):
    """Load tiles of chunk after chunk, from the last, ``STAGES`` ahead; ``steps`` are the rows from one chunk to the next.

    A source wider than its tiles comes in several, side by side. ``done`` is a ring of ``RING`` barriers, not fewer than stages.
    """
    for i in range(count):
        stage = i % STAGES
        before = gl.maximum(i - STAGES, 0)
        mbarrier.wait(done.index(before % RING), before // RING & 1, pred=i >= STAGES)
        mbarrier.expect(full.index(stage), BYTES)
        for n in gl.static_range(SOURCES):
            if sources[n] is not None:
                row = (count - 1 - i) * steps[n]
                for tile in gl.static_range(buffers[n].shape[0] // STAGES):
                    place = buffers[n].index(stage * (buffers[n].shape[0] // STAGES) + tile)
                    tma.load(sources[n], [row, tile * M], full.index(stage), place)


@gluon.jit
def fetch(source, step, chunk, rows, shape):
    """Load the decays [C] of a chunk for ``weigh`` or, per channel, their totals [K], if there is such a chunk."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    if shape.DECAY == CHANNEL:
        here = source + chunk.to(gl.int64) * step + gl.arange(0, shape.K, layout)
        x = gl.load(here, mask=gl.arange(0, shape.K, layout) < gl.where(chunk >= 0, shape.K, 0), other=0.0)
    else:
        token = chunk * C + gl.arange(0, C, layout)
        x = gl.load(source + token.to(gl.int64) * step, mask=(token >= 0) & (token < rows), other=0.0).to(gl.float32)
    return x


@gluon.jit
def weigh(full, done, weights, source, step, rows, count, scale, shape):
    """Turn decays into weights, chunk after chunk from the last.

    Per head: the decay from the start up to each token and up to its query (times the scale), from each token to the end, and of the
    whole chunk. Per channel only the last is loaded, the others have been applied by prepare.
    """
    passed, to_here, to_read, to_end, fade = weights
    if shape.DECAY > 0:
        ahead = fetch(source, step, count - 1, rows, shape)
        for i in range(count):
            stage = i % shape.STAGES
            x = ahead
            ahead = fetch(source, step, count - 2 - i, rows, shape)
            if shape.DECAY == HEAD:
                steps = whole(x, shape.BITS)
                sums = gl.associative_scan(steps, 0, add)
                all_steps = gl.sum(steps, 0)
            mbarrier.wait(done.index(stage), (i // shape.STAGES & 1) ^ 1)
            if shape.DECAY == HEAD:
                to_read.index(stage).store(weight(sums - steps if shape.BEFORE else sums, shape.BITS) * scale)
                if passed is not None:
                    passed.index(stage).store(sums)
                if to_here is not None:
                    to_here.index(stage).store(weight(sums, shape.BITS))
                if to_end is not None:
                    to_end.index(stage).store(weight(all_steps - sums, shape.BITS))
                fade.index(stage).store(gl.full([1], gl.exp2(gl.sum(x, 0) * LOG2E), gl.float32, x.type.layout))
            else:
                fade.index(stage).store(x)
            mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def met(q, k, passed, scale, layout: gl.constexpr, DECAY: gl.constexpr, BITS: gl.constexpr):
    """P [C, C]: masked and decayed products of queries and keys."""
    queries: gl.constexpr = gl.SliceLayout(1, layout)
    keys: gl.constexpr = gl.SliceLayout(0, layout)
    C: gl.constexpr = q.shape[0]
    p = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([C, C], gl.float32, layout), use_acc=False, is_async=True)
    factor = scale
    if DECAY == HEAD:
        factor = weight(passed.load(queries)[:, None] - passed.load(keys)[None, :], BITS) * scale
    p = warpgroup_mma_wait(0, deps=[p])
    return gl.where(gl.arange(0, C, queries)[:, None] >= gl.arange(0, C, keys)[None, :], p * factor, 0.0).to(gl.bfloat16)


@gluon.jit
def put(target, row, column, staged, tile, OUTPUTS: gl.constexpr):
    """Store ``tile`` transposed. The last ``OUTPUTS`` - 1 earlier stores read other memory than ``staged``."""
    tma.store_wait(OUTPUTS - 1)
    staged.permute((1, 0)).store(tile.to(gl.bfloat16))
    fence_async_shared()
    tma.store(target, [row, column], staged)


@gluon.jit
def scan(part: gl.constexpr, bars, firsts, seconds, targets, staging, weights, ends, scale, count, tile_step, shape):
    """Scan 64 columns of the cotangent through ``count`` chunks, from the last."""
    along_c: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    along_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.K, 16])
    left_of_c: gl.constexpr = gl.DotOperandLayout(0, along_c, 2)
    left_of_k: gl.constexpr = gl.DotOperandLayout(0, along_k, 2)
    of_tokens: gl.constexpr = gl.SliceLayout(0, along_c)
    of_channels: gl.constexpr = gl.SliceLayout(0, along_k)
    full, late, done = bars
    dob, ub, pb, bb = firsts
    qb, wb, kb, own_pb, tb = seconds
    dstates_to, dv_to, x_to = targets
    dstates_at, dv_at, x_at, p_at = staging
    OUTPUTS: gl.constexpr = 1 + (dstates_at is not None) + (x_at is not None)
    passed, to_here, to_read, to_end, fade = weights
    start, end, finishes, width, first_column = ends
    if part < shape.PARTS:
        nothing = gl.zeros([M, C], gl.float32, along_c)
        channels = gl.arange(0, shape.K, of_channels)
        columns = first_column + part * M + gl.arange(0, M, gl.SliceLayout(1, along_k))
        if start is not None:
            s = gl.load(
                start + (channels[None, :] + columns[:, None] * shape.K if shape.TURNED else channels[None, :] * width + columns[:, None])
            )
        else:
            s = gl.zeros([M, shape.K], gl.float32, along_k)

        for i in range(count):
            stage = i % shape.STAGES
            then = i % shape.LATE
            chunk = count - 1 - i
            mbarrier.wait(full.index(stage), i // shape.STAGES & 1)
            if p_at is not None:
                mbarrier.wait(late.index(then), i // shape.LATE & 1)
                sums = passed
                if shape.DECAY == HEAD:
                    sums = passed.index(stage)
                p_at.index(part).store(met(qb.index(then), ub.index(stage), sums, scale, along_c, shape.DECAY, shape.BITS))
                fence_async_shared()
            do = dob.index(stage * shape.PARTS + part).permute((1, 0)).load(along_c)
            do_left = gl.convert_layout(do, left_of_c)
            if ub is not None:
                rounded = s.to(gl.bfloat16)
                low = gl.convert_layout(rounded, left_of_c)
                de = warpgroup_mma(low, ub.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
                if dstates_to is not None:
                    put(dstates_to, chunk * tile_step // C * shape.K, part * M, dstates_at.index(part), rounded, OUTPUTS)
                if shape.DECAY == HEAD:
                    de = warpgroup_mma_wait(0, deps=[de]) * to_end.index(stage).load(of_tokens)[None, :]
                if p_at is not None:
                    de = warpgroup_mma(do_left, p_at.index(part), de, is_async=True)
                else:
                    de = warpgroup_mma(do_left, pb.index(stage), de, is_async=True)
                dv = warpgroup_mma_wait(0, deps=[de])
                e = gl.convert_layout(dv.to(gl.bfloat16), left_of_c)
            if shape.RULE == DELTA and bb is not None:
                dv = warpgroup_mma(e, bb.index(stage), nothing, use_acc=False, is_async=True)

            reads = do
            if shape.DECAY == HEAD:
                reads = (do.to(gl.float32) * to_read.index(stage).load(of_tokens)[None, :]).to(gl.bfloat16)
            elif shape.DECAY != CHANNEL:
                reads = (do.to(gl.float32) * scale).to(gl.bfloat16)
            if shape.DECAY > 0:
                s = s * fade.index(stage).load(of_channels)[None, :]
            if p_at is None:
                mbarrier.wait(late.index(then), i // shape.LATE & 1)
            s = warpgroup_mma(gl.convert_layout(reads, left_of_k), qb.index(then), s, is_async=True)
            if wb is not None:
                s = warpgroup_mma(gl.convert_layout(e, left_of_k), wb.index(then), s, is_async=True)
            if kb is not None and shape.DECAY == NONE:
                s = warpgroup_mma_wait(0, deps=[s])  # to save registers
            if shape.RULE == DELTA and bb is not None:
                dv = warpgroup_mma_wait(1 if wb is None else 2, deps=[dv])
                if wb is None:
                    back = -dv
                    if shape.DECAY == HEAD:
                        back = back * to_here.index(stage).load(of_tokens)[None, :]
                    s = warpgroup_mma(gl.convert_layout(back.to(gl.bfloat16), left_of_k), ub.index(stage), s, is_async=True)
            if kb is not None:
                dv = warpgroup_mma(low, kb.index(then).permute((1, 0)), nothing, use_acc=False, is_async=True)
                if shape.DECAY == HEAD:
                    dv = warpgroup_mma_wait(0, deps=[dv]) * to_end.index(stage).load(of_tokens)[None, :]
                dv = warpgroup_mma(do_left, own_pb.index(then), dv, is_async=True)
                dv = warpgroup_mma(e, bb.index(stage), dv, is_async=True)
                dv = warpgroup_mma_wait(0, deps=[dv])
                x = warpgroup_mma(e, tb.index(then), nothing, use_acc=False, is_async=True)
            if not shape.LOCAL:
                put(dv_to, chunk * C, part * M, dv_at.index(part), dv, OUTPUTS)
            if kb is not None:
                x = warpgroup_mma_wait(0, deps=[x])
                put(x_to, chunk * C, part * M, x_at.index(part), x, OUTPUTS)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(done.index(stage), count=1)

        tma.store_wait(0)
        if finishes and end is not None:
            width = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [width], gl.int32, False, 1)  # addresses anew, or they spill
            gl.store(end + channels[None, :] * width + columns[:, None], s)


@gluon.jit
def specialize(
    bars, tiles, steps, targets, staging, weights, decays, ends, scale, count, tile_step, shape, REGISTERS: gl.constexpr
):  # fmt: skip
    """Start the warps: one warpgroup or two for the cotangent, and those that load and weigh for them."""
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
            near = reach_by_decay(decay + first.to(gl.int64) * decay_token + head * decay_head, decay_token, last - first, False)
            last = gl.minimum(last, first + (near + C - 1) // C * C)
        elif LOCAL and DECAY == HEAD and fade is not None:
            near = reach(fade + place, heads, (last - first + C - 1) // C, False)[0]
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
