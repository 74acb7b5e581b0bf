"""``gradients`` of the delta rule for Hopper, in Gluon: decay none or per head. Persistent programs, tiles by TMA, products by wgmma.

A program processes chunk after chunk, of every head. Two warpgroups share the work: each computes one of the two matrices of pairs of
tokens, which both then read, and all gradients of half of the channels. One warp prefetches, one turns decays into weights, and two
sum the gradient of the decay. With G = dO Eᵀ ∘ D on and below the diagonal and N = -dE Eᵀ ∘ D below it,

    dQ = fade (dO Sᵀ) + G K        dK = to_end (E dSᵀ) + Gᵀ Q - fade (dE Sᵀ) + (N + Nᵀ) K

A tile ends with its sequence: rows past the end are read as zeros and not stored, though other sequences may follow in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.call import Bars, Loaded, Sources
from linattn.ops.triton.hopper.chunks import chunk, dense, fetch, of_states, ragged, state_at
from linattn.ops.triton.hopper.common import away_from_zero, barriers, buffer, give_back, numbers, weight
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import C
from linattn.ops.triton.hopper.whole import add_up, weigh
from linattn.ops.triton.tiles import HEAD


class Shape(NamedTuple):
    """Constants beyond :class:`call.Sizes`."""

    DECAY: Any
    BITS: Any
    SUMS: Any  # True if the decay's gradient is computed


class Tiles(NamedTuple):
    """Shared memory."""

    loaded: Loaded  # q, k, S and dS in two halves of the channels
    pairs: Any  # G and N
    sent: Any  # gradients


@gluon.jit
def load(bars, sources, tiles, work, group, sizes, shape):
    """Load the tiles of chunk after chunk as soon as their memory is free."""
    room = tiles.loaded
    V: gl.constexpr = sizes.V
    HALF: gl.constexpr = sizes.K // 2
    i = 0
    for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
        here = chunk(place, work, sizes.PACKED)
        if here.rows > 0:
            phase = (i & 1) ^ 1
            mbarrier.wait(bars.empty.index(0), phase)
            mbarrier.expect(bars.full.index(0), 6 * C * V)
            fetch(sources.loaded.do, here, bars.full.index(0), room.do.index(0), V)
            fetch(sources.loaded.x, here, bars.full.index(0), room.x.index(0), V)
            fetch(sources.loaded.v, here, bars.full.index(0), room.v.index(0), V)
            mbarrier.wait(bars.state_empty.index(0), phase)
            mbarrier.expect(bars.state_full.index(0), 2 * sizes.K * V)
            mbarrier.expect(bars.state_full.index(1), 2 * sizes.K * V)
            for half in gl.static_range(2):
                at = state_at(place, half * HALF, sizes.K, V, sizes.SPLIT)
                tma.load(sources.loaded.states, at, bars.state_full.index(0), room.states.index(half))
            for half in gl.static_range(2):
                at = state_at(place, half * HALF, sizes.K, V, sizes.SPLIT)
                tma.load(sources.loaded.dstates, at, bars.state_full.index(1), room.dstates.index(half))
            mbarrier.wait(bars.pair_empty.index(0), phase)
            mbarrier.expect(bars.pair_full.index(0), 4 * C * sizes.K)
            for half in gl.static_range(2):
                at = [here.head // group, here.first + here.rows, C - here.rows, half * HALF]
                tma.load(sources.loaded.q, at, bars.pair_full.index(0), room.q.index(half).reshape((1, 1, C, HALF)))
                tma.load(sources.loaded.k, at, bars.pair_full.index(0), room.k.index(half).reshape((1, 1, C, HALF)))
            i += 1


@gluon.jit
def save_strengths(n, strengths, here, token, other):
    """Store the gradients of the strengths, the diagonal of the products ``n`` of cotangents and values over the squared strengths."""
    row = gl.arange(0, C, gl.SliceLayout(1, n.type.layout))
    time = here.first.to(gl.int64) + row
    inside = row < here.rows
    of_head = strengths.base + time * strengths.token + here.head // strengths.split * strengths.head
    b = away_from_zero(gl.load(of_head, mask=inside, other=1.0).to(gl.float32))
    d = gl.sum(gl.where(token == other, n, 0.0), 1) / (b * b)
    gl.store(strengths.to + time * strengths.heads + here.head, d.to(strengths.to.dtype.element_ty), mask=inside)


@gluon.jit
def half(part: gl.constexpr, bars, sources, tiles, weights, strengths, results, work, scale, sizes, shape):
    """Compute one matrix of pairs (G if ``part`` is 0, else N), and compute the gradients of half of the channels."""
    room = tiles.loaded
    HALF: gl.constexpr = sizes.K // 2
    SUMS: gl.constexpr = shape.SUMS
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    rows: gl.constexpr = gl.SliceLayout(1, wide)
    total, rows_of = weights
    token = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    other = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    nothing = gl.zeros([C, C], gl.float32, square)
    none = gl.zeros([C, HALF], gl.float32, wide)
    i = 0
    for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
        here = chunk(place, work, sizes.PACKED)
        if here.rows > 0:
            phase = i & 1
            at = i % 2
            zero = here.rows // (2 * C)  # recomputed in each step, so that dependent values do not stay in registers
            do, x, e = room.do.index(zero), room.x.index(zero), room.v.index(zero)
            q, k = room.q.index(zero + part), room.k.index(zero + part)
            g_pairs, n_pairs = tiles.pairs.index(zero), tiles.pairs.index(zero + 1)
            mbarrier.wait(bars.full.index(0), phase)
            pairs = warpgroup_mma(x if part else do, e.permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(bars.state_full.index(0), phase)
            state = room.states.index(zero + part).permute((1, 0))
            dq = warpgroup_mma(do, state, none, use_acc=False, is_async=True)
            dr = warpgroup_mma(x, state, none, use_acc=False, is_async=True)
            pairs = warpgroup_mma_wait(2, deps=[pairs])
            if part:
                save_strengths(pairs, strengths, here, token, other)
            if shape.DECAY == HEAD:
                mbarrier.wait(bars.decay_full.index(at), i // 2 & 1)
                steps = total.index(at).load(gl.SliceLayout(1, square))[:, None] - total.index(at).load(gl.SliceLayout(0, square))[None, :]
                pairs = pairs * weight(steps, shape.BITS)
            if part:
                pairs = gl.where(token > other, -pairs, 0.0)
            else:
                pairs = gl.where(token >= other, pairs * scale, 0.0)
            mbarrier.wait(bars.used.index(0), phase ^ 1)
            tiles.pairs.index(part).store(pairs.to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(bars.scaled.index(0), count=1)

            mbarrier.wait(bars.pair_full.index(0), phase)
            if SUMS:
                met = warpgroup_mma(
                    (room.k if part else room.q).index(zero), room.k.index(zero).permute((1, 0)), nothing, use_acc=False, is_async=True
                )
                met = warpgroup_mma(
                    (room.k if part else room.q).index(zero + 1), room.k.index(zero + 1).permute((1, 0)), met, is_async=True
                )
                dq, dr, met = warpgroup_mma_wait(0, deps=[dq, dr, met])
                met = gl.where(token > other, pairs * met, 0.0)
                inside = gl.convert_layout(gl.sum(met, 1), rows)
                mbarrier.wait(bars.sum_empty.index(0), phase ^ 1)
                results.index(2 + part).store(gl.sum(met, 0))
            mbarrier.wait(bars.state_full.index(1), phase)
            dk = warpgroup_mma(e, room.dstates.index(zero + part).permute((1, 0)), none, use_acc=False, is_async=True)
            if not SUMS:
                dq, dr = warpgroup_mma_wait(1, deps=[dq, dr])
            if shape.DECAY == HEAD:
                from_start = rows_of.index(2 * at).load(rows)[:, None]
                to_end = rows_of.index(2 * at + 1).load(rows)[:, None]
                give_back(bars.decay_empty.index(at))
                dq = dq * (from_start * scale)
                dr = dr * -from_start
            else:
                dq = dq * scale
                dr = -dr
            if SUMS:
                crossing = inside + gl.sum(q.load(wide).to(gl.float32) * dq, 1)
                keys = k.load(wide).to(gl.float32)
                results.index(part).store(crossing + gl.sum(keys * dr, 1))
            dk = warpgroup_mma_wait(0, deps=[dk])
            mbarrier.arrive(bars.empty.index(0), count=1)
            mbarrier.arrive(bars.state_empty.index(0), count=1)
            if shape.DECAY == HEAD:
                dk = dk * to_end
            if SUMS:
                results.index(4 + part).store(gl.sum(keys * dk, 1))
                mbarrier.arrive(bars.sum_full.index(0), count=1)
            dk = dk + dr
            mbarrier.wait(bars.scaled.index(0), phase)
            dq = warpgroup_mma(g_pairs, k, dq, is_async=True)
            dk = warpgroup_mma(g_pairs.permute((1, 0)), q, dk, is_async=True)
            dk = warpgroup_mma(n_pairs, k, dk, is_async=True)
            dk = warpgroup_mma(n_pairs.permute((1, 0)), k, dk, is_async=True)
            dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
            give_back(bars.pair_empty.index(0))
            mbarrier.arrive(bars.used.index(0), count=1)
            tma.store_wait(0)
            tiles.sent.index(2 * part).store(dq.to(gl.bfloat16))
            tiles.sent.index(2 * part + 1).store(dk.to(gl.bfloat16))
            fence_async_shared()
            where = [here.head, here.first + here.rows, C - here.rows, part * HALF]
            tma.store(sources.dq, where, tiles.sent.index(2 * part).reshape((1, 1, C, HALF)))
            tma.store(sources.dk, where, tiles.sent.index(2 * part + 1).reshape((1, 1, C, HALF)))
            i += 1
    tma.store_wait(0)


@gluon.jit
def gradients(call, work, sizes, DECAY: gl.constexpr, BITS: gl.constexpr, REGISTERS: gl.constexpr, FEW: gl.constexpr):
    """Compute all gradients inside the chunks."""
    K: gl.constexpr = sizes.K
    V: gl.constexpr = sizes.V
    HALF: gl.constexpr = K // 2
    key_heads = work.heads // call.group
    SUMS: gl.constexpr = sizes.DDECAY and DECAY == HEAD
    loaded = Loaded(
        ragged(call.q, call.tokens, key_heads, K, HALF),
        ragged(call.k, call.tokens, key_heads, K, HALF),
        dense(call.u, call.tokens, work.heads, V, V),
        ragged(call.do, call.tokens, work.heads, V, V),
        dense(call.x, call.tokens, work.heads, V, V),
        of_states(call.states, work.places, K, V, sizes.SPLIT, HALF),
        of_states(call.dstates, work.places, K, V, sizes.SPLIT, HALF),
    )
    sources = Sources(loaded, dense(call.dq, call.tokens, work.heads, K, HALF), dense(call.dk, call.tokens, work.heads, K, HALF))
    room = Loaded(
        buffer(2, C, HALF), buffer(2, C, HALF), buffer(1, C, V), buffer(1, C, V), buffer(1, C, V), buffer(2, HALF, V), buffer(2, HALF, V)
    )  # fmt: skip
    tiles = Tiles(room, buffer(2, C, C), buffer(4, C, HALF))
    weights, results = (None, None), None
    decay_full, decay_empty, sum_full, sum_empty = None, None, None, None
    if DECAY == HEAD:
        weights = (numbers(2, C, gl.int32), numbers(4, C, gl.float32))
        decay_full, decay_empty = barriers(2, 1), barriers(2, 2)
    if SUMS:
        results = numbers(6, C, gl.float32)
        sum_full, sum_empty = barriers(1, 2), barriers(1, 1)
    bars = Bars(
        barriers(1, 1), barriers(1, 2), barriers(1, 1), barriers(1, 2), barriers(2, 1), barriers(1, 2 + SUMS),
        decay_full, decay_empty, barriers(1, 2), barriers(1, 2), sum_full, sum_empty,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (half, (0, bars, sources, tiles, weights, call.strengths, results, work, call.scale, sizes, Shape(DECAY, BITS, SUMS))),
        (half, (1, bars, sources, tiles, weights, call.strengths, results, work, call.scale, sizes, Shape(DECAY, BITS, SUMS))),
        (add_up, (bars, tiles, results, call.decays, call.ddecay, work, sizes, Shape(DECAY, BITS, SUMS))),
        (load, (bars, sources, tiles, work, call.group, sizes, Shape(DECAY, BITS, SUMS))),
        (weigh, (bars, weights, call.decays, work, sizes, Shape(DECAY, BITS, SUMS))),
    ], [4, 2, 1, 1], [REGISTERS, FEW, FEW, FEW])  # fmt: skip


def options() -> dict[str, int]:
    """Registers of a program. A multiprocessor runs one program at a time."""
    return dict(STAGES=1, REGISTERS=200, FEW=104, num_warps=4, maxnreg=168)
