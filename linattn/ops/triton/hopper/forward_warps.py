"""Warps of forward.py: the warpgroups that scan a state, and those that load, store, turn decays into weights, and compute P."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.common import M, add, final_state, initial_state, weight, whole
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
    MEETS: Any  # True if P is computed here
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
    chunk. Per channel only the last is loaded; prepare has applied the others.
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
    """Compute P, the masked and decayed products of queries and keys, if it is not prepared."""
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
    """Pass ``x`` [64, ...] to the storing warp, after it has stored that of the previous chunk."""
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
    else:
        s = initial_state(start, channels, columns, width, shape.TURNED, shape.K)

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
            final_state(end, s, channels, columns, width)
