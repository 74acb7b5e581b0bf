"""``gradients`` for Hopper, in Gluon: plain and delta rule, decay none or per head. Persistent programs, tiles by TMA, products by wgmma.

A program processes chunk after chunk, of every head. One warp prefetches; one warpgroup computes the gradients of queries, one those
of keys, symmetrically from the same tiles; one warp turns decays into weights, and two sum the gradient of the decay.

    dQ = fade (dO Sᵀ) + (dO Vᵀ ∘ D) K        dK = to_end (V dSᵀ) + (V dOᵀ ∘ Dᵀ) Q

With the delta rule the values are the written ones, E, and keys read too, with the cotangent -dE. Products of pairs of keys are
symmetric, so one product serves reading keys and keys that are read:

    dK += (N + Nᵀ) K - fade (dE Sᵀ),   N = -(dE Eᵀ ∘ D) strictly below the diagonal

A tile ends with its sequence: rows past the end are read as zeros and not stored, though other sequences may follow in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.call import Bars, Loaded, Sources, Tiles
from linattn.ops.triton.hopper.chunks import Chunk, chunk, dense, fetch, of_states, ragged, state_at
from linattn.ops.triton.hopper.common import SHARED, add, away_from_zero, barriers, buffer, give_back, numbers, weight, whole
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import C
from linattn.ops.triton.plan import Family
from linattn.ops.triton.tiles import DELTA, HEAD, LOG2E


class Shape(NamedTuple):
    """Constants beyond :class:`call.Sizes`."""

    DECAY: Any
    RULE: Any
    BITS: Any
    SUMS: Any  # True if the decay's gradient is computed
    PAIRS: Any  # stages of queries and keys


@gluon.jit
def load_pair(bars, sources, tiles, i, here, group, sizes, shape):
    """Load the queries and keys of a chunk."""
    of_keys = Chunk(here.head // group, here.first, here.rows)
    stage = i % shape.PAIRS
    bar = bars.pair_full.index(stage)
    mbarrier.wait(bars.pair_empty.index(stage), (i // shape.PAIRS & 1) ^ 1)
    mbarrier.expect(bar, 4 * C * sizes.K)
    fetch(sources.loaded.q, of_keys, bar, tiles.loaded.q.index(stage), sizes.K)
    fetch(sources.loaded.k, of_keys, bar, tiles.loaded.k.index(stage), sizes.K)


@gluon.jit
def load(bars, sources, tiles, work, group, sizes, shape):
    """Prefetch the tiles of chunk after chunk into free buffers, in the order in which these become free."""
    room = tiles.loaded
    K: gl.constexpr = sizes.K
    i = 0
    for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
        here = chunk(place, work, sizes.PACKED)
        if here.rows > 0:
            stage = i % sizes.STAGES
            bar = bars.full.index(stage)
            mbarrier.wait(bars.empty.index(stage), (i // sizes.STAGES & 1) ^ 1)
            mbarrier.expect(bar, (4 if sources.loaded.x is None else 6) * C * sizes.V)
            fetch(sources.loaded.v, here, bar, room.v.index(stage), sizes.V)
            if sources.loaded.x is not None:
                fetch(sources.loaded.x, here, bar, room.x.index(stage), sizes.V)
            fetch(sources.loaded.do, here, bar, room.do.index(stage), sizes.V)
            if shape.PAIRS == sizes.STAGES:
                load_pair(bars, sources, tiles, i, here, group, sizes, shape)
            for state in gl.static_range(2):
                there = bars.state_full.index(state)
                mbarrier.wait(bars.state_empty[state].index(0), (i & 1) ^ 1)
                mbarrier.expect(there, 2 * K * sizes.V)
                of_state = state_at(place, 0, K, sizes.V, sizes.SPLIT)
                tma.load(sources.loaded.states if state == 0 else sources.loaded.dstates, of_state, there, room.states.index(state))
            if shape.PAIRS != sizes.STAGES:
                load_pair(bars, sources, tiles, i, here, group, sizes, shape)
            i += 1


@gluon.jit
def weigh(bars, weights, decays, work, sizes, shape):
    """Turn decays into whole steps summed up to each token, and into decays of a state up to there and of a write to the end."""
    total, rows_of = weights
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    if shape.DECAY == HEAD:
        i = 0
        for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
            here = chunk(place, work, sizes.PACKED)
            if here.rows > 0:
                row = gl.arange(0, C, layout)
                inside = row < here.rows
                of_head = decays.base + (here.first.to(gl.int64) + row) * decays.token + here.head // decays.split * decays.head
                steps = whole(gl.load(of_head, mask=inside, other=0.0), shape.BITS)
                sums = gl.associative_scan(steps, 0, add)
                at = i % 2
                mbarrier.wait(bars.decay_empty.index(at), (i // 2 & 1) ^ 1)
                total.index(at).store(sums)
                rows_of.index(2 * at).store(weight(sums, shape.BITS))
                rows_of.index(2 * at + 1).store(weight(gl.sum(steps, 0) - sums, shape.BITS))
                mbarrier.arrive(bars.decay_full.index(at), count=1)
                i += 1


@gluon.jit
def add_up(bars, tiles, results, decays, ddecay, work, sizes, shape):
    """Sum the gradient of the decay: of reads across each token, of writes past it, and of the state that passes the whole chunk.

    If the cotangents of the state are separate tiles, as in whole_delta.py, each half of the channels has its own results.
    """
    HALVES: gl.constexpr = tiles.loaded.dstates is not None
    PARTS: gl.constexpr = 2 if HALVES else 1
    square: gl.constexpr = gl.BlockedLayout([1, C // PARTS], [32 // PARTS, PARTS], [2, 1], [1, 0])
    layout: gl.constexpr = gl.SliceLayout(1, square)
    others: gl.constexpr = gl.SliceLayout(0, square)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    SLICE: gl.constexpr = 16
    if shape.SUMS:
        i = 0
        for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
            here = chunk(place, work, sizes.PACKED)
            if here.rows > 0:
                row = gl.arange(0, C, layout)
                time = here.first.to(gl.int64) + row
                inside = row < here.rows
                of_head = decays.base + time * decays.token + here.head // decays.split * decays.head
                d = gl.load(of_head, mask=inside, other=0.0).to(gl.float32)
                faded = gl.exp2(gl.sum(d, 0) * LOG2E)
                mbarrier.wait(bars.state_full.index(0), i & 1)
                mbarrier.wait(bars.state_full.index(1), i & 1)
                both = gl.zeros([SLICE, sizes.V], gl.float32, wide)
                for half in gl.static_range(PARTS):
                    for part in gl.static_range(sizes.K // PARTS // SLICE):
                        s = tiles.loaded.states.index(half).slice(part * SLICE, SLICE, 0).load(wide).to(gl.float32)
                        ds = tiles.loaded.dstates.index(half) if HALVES else tiles.loaded.states.index(1)
                        both += s * ds.slice(part * SLICE, SLICE, 0).load(wide).to(gl.float32)
                if HALVES:
                    give_back(bars.state_empty.index(0))
                else:
                    give_back(bars.state_empty[0].index(0))
                    mbarrier.arrive(bars.state_empty[1].index(0), count=1)
                past = faded * gl.sum(gl.sum(both, 1), 0)
                mbarrier.wait(bars.sum_full.index(0), i & 1)
                if HALVES:
                    crossing = results.index(0).load(others) + results.index(1).load(others)
                    crossing -= results.index(2).load(others) + results.index(3).load(others)
                    sending = results.index(4).load(others) + results.index(5).load(others)
                else:
                    crossing = results.index(0).load(others) - results.index(1).load(others)
                    sending = results.index(2).load(others)
                give_back(bars.sum_empty.index(0))
                later = gl.arange(0, C, others)[None, :] >= row[:, None]
                dd = gl.sum(gl.where(later, crossing[None, :], sending[None, :]), 1) + past
                gl.store(ddecay + time * work.heads + here.head, dd.to(ddecay.dtype.element_ty), mask=inside)
                i += 1


@gluon.jit
def between(total, layout: gl.constexpr):
    """Steps between each pair of tokens."""
    return total.load(gl.SliceLayout(1, layout))[:, None] - total.load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def recall(bars, tiles, weights, strengths, i, here, sizes, shape):
    """Gradients of keys from products of keys, on either side, and their part of the decay's gradient.

    The gradient of the strength is the diagonal of the products of keys with each other's values.
    """
    room = tiles.loaded
    K: gl.constexpr = sizes.K
    PAIRS: gl.constexpr = shape.PAIRS
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    total, rows_of = weights
    token = gl.arange(0, C, gl.SliceLayout(1, square))
    other = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    time = here.first.to(gl.int64) + token
    inside = token < here.rows
    of_head = strengths.base + time * strengths.token + here.head // strengths.split * strengths.head
    b = away_from_zero(gl.load(of_head, mask=inside, other=1.0).to(gl.float32))
    nothing = gl.zeros([C, C], gl.float32, square)
    key, value, cotangent = room.k.index(i % PAIRS), room.v.index(i % sizes.STAGES), room.x.index(i % sizes.STAGES)
    mbarrier.wait(bars.full.index(i % sizes.STAGES), i // sizes.STAGES & 1)
    n = warpgroup_mma(cotangent, value.permute((1, 0)), nothing, use_acc=False, is_async=True)
    m = warpgroup_mma(value, cotangent.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(bars.state_full.index(0), i & 1)
    state = room.states.index(0)
    d = warpgroup_mma(cotangent, state.permute((1, 0)), gl.zeros([C, K], gl.float32, wide), use_acc=False, is_async=True)
    n, m = warpgroup_mma_wait(1, deps=[n, m])
    strength = gl.sum(gl.where(token[:, None] == other, n, 0.0), 1)
    to = strengths.to + time * strengths.heads + here.head
    gl.store(to, (strength / (b * b)).to(strengths.to.dtype.element_ty), mask=inside)
    n = gl.where(token[:, None] > other, -n, gl.where(token[:, None] < other, -m, 0.0))
    if shape.DECAY == HEAD:
        at = i % 2
        mbarrier.wait(bars.decay_full.index(at), i // 2 & 1)
        n = n * gl.exp2(-gl.abs(between(total.index(at), square)).to(gl.float32) * (2.0**-shape.BITS))
        row = rows_of.index(2 * at).load(gl.SliceLayout(1, wide))
    mbarrier.wait(bars.pair_full.index(i % PAIRS), i // PAIRS & 1)
    crossing = 0.0
    if shape.SUMS:
        a = warpgroup_mma(key, key.permute((1, 0)), nothing, use_acc=False, is_async=True)
        a = warpgroup_mma_wait(0, deps=[a])
        inside = gl.sum(gl.where(token[:, None] > other, n * a, -n * a), 1)
    d = warpgroup_mma_wait(0, deps=[d])
    mbarrier.arrive(bars.state_empty[0].index(0), count=1)
    d = d * (-row[:, None] if shape.DECAY == HEAD else -1.0)
    if shape.SUMS:
        crossing = gl.convert_layout(inside, gl.SliceLayout(1, wide)) + gl.sum(key.load(wide).to(gl.float32) * d, 1)
    n = gl.convert_layout(n.to(gl.bfloat16), gl.DotOperandLayout(0, wide, 2))
    d = warpgroup_mma(n, key, d, is_async=True)
    return warpgroup_mma_wait(0, deps=[d]), crossing


@gluon.jit
def side(READS: gl.constexpr, bars, sources, tiles, weights, strengths, results, work, scale, sizes, shape):
    """Compute the gradients of queries (``READS``) or of keys, and their part of the decay's."""
    room = tiles.loaded
    K: gl.constexpr = sizes.K
    PAIRS: gl.constexpr = shape.PAIRS
    DECAY: gl.constexpr = shape.DECAY
    RULE: gl.constexpr = shape.RULE
    SUMS: gl.constexpr = shape.SUMS
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    total, rows_of = weights
    mine: gl.constexpr = 0 if READS else 1
    FULL: gl.constexpr = RULE == DELTA and SUMS  # wide products wait for narrow ones, to save registers
    token = gl.arange(0, C, gl.SliceLayout(1, square))[:, None]
    other = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    nothing = gl.zeros([C, C], gl.float32, square)
    none = gl.zeros([C, K], gl.float32, wide)
    i = 0
    for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
        here = chunk(place, work, sizes.PACKED)
        if here.rows > 0:
            stage, pair = i % sizes.STAGES, i % PAIRS
            if READS:
                vector, partner, own, theirs = (
                    room.q.index(pair),
                    room.k.index(pair),
                    room.do.index(stage),
                    room.v.index(stage),
                )
            else:
                vector, partner, own, theirs = (
                    room.k.index(pair),
                    room.q.index(pair),
                    room.v.index(stage),
                    room.do.index(stage),
                )
            if RULE == DELTA and not READS:
                recalled, crossing = recall(bars, tiles, weights, strengths, i, here, sizes, shape)
            else:
                mbarrier.wait(bars.full.index(stage), i // sizes.STAGES & 1)
            g = warpgroup_mma(own, theirs.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if SUMS:
                mbarrier.wait(bars.pair_full.index(pair), i // PAIRS & 1)
                a = warpgroup_mma(vector, partner.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if FULL:
                g, a = warpgroup_mma_wait(0, deps=[g, a])
            else:
                mbarrier.wait(bars.state_full.index(mine), i & 1)
                d = warpgroup_mma(own, room.states.index(mine).permute((1, 0)), none, use_acc=False, is_async=True)
                if SUMS:
                    g, a = warpgroup_mma_wait(1, deps=[g, a])
                else:
                    g = warpgroup_mma_wait(1, deps=[g])
            if DECAY == HEAD:
                at = i % 2
                mbarrier.wait(bars.decay_full.index(at), i // 2 & 1)
                steps = between(total.index(at), square)
                g = g * gl.exp2((steps if READS else -steps).to(gl.float32) * (2.0**-shape.BITS))
                row = rows_of.index(2 * at + mine).load(gl.SliceLayout(1, wide))
                give_back(bars.decay_empty.index(at))
            g = gl.where(token >= other if READS else token <= other, g * scale, 0.0)
            if SUMS:
                inside = gl.sum(gl.where(token != other, g * a, 0.0), 1)
            g = gl.convert_layout(g.to(gl.bfloat16), left)
            if FULL:
                mbarrier.wait(bars.state_full.index(mine), i & 1)
                d = warpgroup_mma(own, room.states.index(mine).permute((1, 0)), none, use_acc=False, is_async=True)
            d = warpgroup_mma_wait(0, deps=[d])
            mbarrier.arrive(bars.empty.index(stage), count=1)
            mbarrier.arrive(bars.state_empty[mine].index(0), count=1)
            if DECAY == HEAD:
                d = d * (row * scale if READS else row)[:, None]
            elif READS:
                d = d * scale
            if SUMS:
                outside = gl.sum(vector.load(wide).to(gl.float32) * d, 1)
            else:
                mbarrier.wait(bars.pair_full.index(pair), i // PAIRS & 1)
            if RULE == DELTA and not READS:
                d = d + recalled
            d = warpgroup_mma(g, partner, d, is_async=True)
            if SUMS:
                mbarrier.wait(bars.sum_empty.index(0), (i & 1) ^ 1)
                if READS:
                    results.index(0).store(gl.convert_layout(inside, gl.SliceLayout(1, wide)) + outside)
                else:
                    inside = gl.convert_layout(inside, gl.SliceLayout(1, wide))
                    results.index(1).store(inside - crossing if RULE == DELTA else inside)
                    results.index(2).store(outside)
                mbarrier.arrive(bars.sum_full.index(0), count=1)
            d = warpgroup_mma_wait(0, deps=[d])
            mbarrier.arrive(bars.pair_empty.index(pair), count=1)
            tma.store_wait(0)
            tiles.hats.index(mine).store(d.to(gl.bfloat16))
            fence_async_shared()
            at = [here.head, here.first + here.rows, C - here.rows, 0]  # type: ignore[assignment]  # once a number, here a position
            tma.store(sources.dq if READS else sources.dk, at, tiles.hats.index(mine).reshape((1, 1, C, K)))
            i += 1
    tma.store_wait(0)


@gluon.jit
def gradients(
    call, work, sizes,
    DECAY: gl.constexpr, RULE: gl.constexpr, BITS: gl.constexpr, PAIRS: gl.constexpr, REGISTERS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """Compute all gradients inside the chunks."""
    K: gl.constexpr = sizes.K
    STAGES: gl.constexpr = sizes.STAGES
    key_heads = work.heads // call.group
    SUMS: gl.constexpr = sizes.DDECAY and DECAY == HEAD
    READERS: gl.constexpr = 1 + SUMS  # warpgroups that read a state
    vd, xd, xb = None, None, None
    if RULE == DELTA:
        vd, xd = dense(call.u, call.tokens, work.heads, sizes.V, sizes.V), dense(call.x, call.tokens, work.heads, sizes.V, sizes.V)
        xb = buffer(STAGES, C, sizes.V)
    else:
        vd = ragged(call.v, call.tokens, work.heads, sizes.V, sizes.V)
    loaded = Loaded(
        ragged(call.q, call.tokens, key_heads, K, K),
        ragged(call.k, call.tokens, key_heads, K, K),
        vd,
        ragged(call.do, call.tokens, work.heads, sizes.V, sizes.V),
        xd,
        of_states(call.states, work.places, K, sizes.V, sizes.SPLIT, K),
        of_states(call.dstates, work.places, K, sizes.V, sizes.SPLIT, K),
    )
    sources = Sources(loaded, dense(call.dq, call.tokens, work.heads, K, K), dense(call.dk, call.tokens, work.heads, K, K))
    room = Loaded(
        buffer(PAIRS, C, K), buffer(PAIRS, C, K), buffer(STAGES, C, sizes.V), buffer(STAGES, C, sizes.V), xb, buffer(2, K, sizes.V), None
    )  # fmt: skip
    tiles = Tiles(room, None, None, None, buffer(2, C, K), None)
    weights, results = (None, None), None
    decay_full, decay_empty, sum_full, sum_empty = None, None, None, None
    if DECAY == HEAD:
        weights = (numbers(2, C, gl.int32), numbers(4, C, gl.float32))
        decay_full, decay_empty = barriers(2, 1), barriers(2, 2)
    if SUMS:
        results = numbers(3, C, gl.float32)
        sum_full, sum_empty = barriers(1, 2), barriers(1, 1)
    bars = Bars(
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(PAIRS, 1), barriers(PAIRS, 2),
        barriers(2, 1), (barriers(1, READERS + (RULE == DELTA)), barriers(1, READERS)),
        decay_full, decay_empty, None, None, sum_full, sum_empty,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (side, (True, bars, sources, tiles, weights, call.strengths, results, work, call.scale, sizes,
                Shape(DECAY, RULE, BITS, SUMS, PAIRS))),
        (side, (False, bars, sources, tiles, weights, call.strengths, results, work, call.scale, sizes,
                Shape(DECAY, RULE, BITS, SUMS, PAIRS))),
        (add_up, (bars, tiles, results, call.decays, call.ddecay, work, sizes, Shape(DECAY, RULE, BITS, SUMS, PAIRS))),
        (load, (bars, sources, tiles, work, call.group, sizes, Shape(DECAY, RULE, BITS, SUMS, PAIRS))),
        (weigh, (bars, weights, call.decays, work, sizes, Shape(DECAY, RULE, BITS, SUMS, PAIRS))),
    ], [4, 2, 1, 1], [REGISTERS, FEW, FEW, FEW])  # fmt: skip


def options(family: Family, size_k: int, size_v: int) -> dict[str, int]:
    """Pipeline depth and registers of a program. A multiprocessor runs one program at a time."""
    delta = family.rule == DELTA.value
    fixed = 4 * size_k * size_v + 256 * size_k + 256 * (3 if delta else 2) * size_v + 3072  # bytes: states, results, values, the rest
    pairs = min(2, (SHARED - fixed) // (256 * size_k))
    return dict(STAGES=2, PAIRS=pairs, num_warps=4, REGISTERS=232 if delta else 200, FEW=104, maxnreg=168)
