"""Warps of backward.py: the warpgroups that scan a state's cotangent, and those that load and turn decays into weights for them."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.common import M, add, final_state, initial_state, weight, whole
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import C
from linattn.ops.triton.tiles import CHANNEL, DELTA, HEAD, LOG2E, NONE


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

    A source wider than its tiles is loaded as several, side by side. ``done`` is a ring of ``RING`` barriers, at least as many as stages.
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
    whole chunk. Per channel only the last is loaded; prepare has applied the others.
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
    """Store ``tile`` transposed. The last ``OUTPUTS`` - 1 earlier stores read from other buffers than ``staged``."""
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
        s = initial_state(start, channels, columns, width, shape.TURNED, shape.K)

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
            final_state(end, s, channels, columns, width)
