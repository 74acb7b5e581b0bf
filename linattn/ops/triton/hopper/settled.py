"""Helpers of the kernels for decays within the range of one product: a warpgroup prepares decays and sums the gradient of the decay."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import decays, tma
from linattn.ops.triton.hopper.chunks import chunk, fetch, state_at
from linattn.ops.triton.hopper.common import give_back
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier
from linattn.ops.triton.hopper.operands import BLOCK, WIDE, C, exp2, in_blocks, passing

SLOTS = gl.constexpr(2)  # blocks of channels in flight


@gluon.jit
def seek(place, work, PACKED: gl.constexpr):
    """First chunk with tokens of this program from ``place`` on."""
    if PACKED:
        rows = chunk(place, work, PACKED).rows
        while (place < work.places) & (rows <= 0):
            place += gl.num_programs(0)
            rows = chunk(place, work, PACKED).rows
    return place


@gluon.jit
def any_settles(work, call, sizes):
    """True if a block of channels of this program's chunks settles, so that there is something to do."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    WARPS: gl.constexpr = gl.num_warps()
    ahead = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    most = -1
    start = gl.program_id(0)
    while start < work.places:
        place = start + ahead // BLOCKS * gl.num_programs(0)
        tokens = decays.settles(call.settled, place * BLOCKS + ahead % BLOCKS, work, sizes)
        most = gl.max(tokens, 0)
        start = gl.where(most >= C, work.places, start + 32 * WARPS // BLOCKS * gl.num_programs(0))
    return most >= C


@gluon.jit
def load_states(bars, sources, tiles, place, block, j, sizes):
    """Start to load a block's states."""
    slot, phase = j % SLOTS, (j // SLOTS & 1) ^ 1
    there = bars.state_full.index(slot)
    mbarrier.wait(bars.state_empty.index(slot), phase)
    mbarrier.expect(there, 4 * BLOCK * sizes.V)
    of_state = state_at(place, block * BLOCK, sizes.K, sizes.V, sizes.SPLIT)
    tma.load(sources.loaded.states, of_state, there, tiles.loaded.states.index(slot))
    tma.load(sources.loaded.dstates, of_state, there, tiles.loaded.dstates.index(slot))


@gluon.jit
def load_pair(bars, sources, tiles, here, block, j, group):
    """Start to load a block's queries and keys."""
    slot, phase = j % SLOTS, (j // SLOTS & 1) ^ 1
    there = bars.pair_full.index(slot)
    at = [here.head // group, here.first + here.rows, C - here.rows, block * BLOCK]
    mbarrier.wait(bars.pair_empty.index(slot), phase)
    mbarrier.expect(there, 4 * C * BLOCK)
    tma.load(sources.loaded.q, at, there, tiles.loaded.q.index(slot).reshape((1, 1, C, BLOCK)))
    tma.load(sources.loaded.k, at, there, tiles.loaded.k.index(slot).reshape((1, 1, C, BLOCK)))


@gluon.jit
def lay_out(early, late, slot, bars, tiles, sizes):
    """Prepare a block's decays for sums."""
    middle = decays.lay_out(early, late, tiles.high, tiles.low, slot, sizes.LOW)
    tiles.factors.index(2 * slot).store(middle)
    tiles.factors.index(2 * slot + 1).store(exp2(middle))
    fence_async_shared()
    mbarrier.arrive(bars.decay_full.index(slot), count=1)


@gluon.jit
def passing_chunk(bars, tiles, used, at, j, V: gl.constexpr):
    """Product of the states and their cotangents by channel. Arrives at the ``at``-th of ``used`` after reading them."""
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    slot = j % SLOTS
    mbarrier.wait(bars.state_full.index(slot), j // SLOTS & 1)
    states, dstates = in_blocks(tiles.loaded.states.index(slot), BLOCK, V), in_blocks(tiles.loaded.dstates.index(slot), BLOCK, V)
    both = passing(states, dstates, V)
    give_back(used.index(at))
    past = gl.convert_layout(gl.sum(both, 1), of_channels)
    weight = tiles.factors.index(2 * slot + 1).load(of_channels)
    return past * (weight * weight)


@gluon.jit
def load(bars, sources, tiles, work, call, sizes, TWICE: gl.constexpr):
    """Prefetch tiles into free buffers, in the order in which these become free.

    With ``TWICE`` keys read too: there are cotangents of values, and queries and keys are released before states.
    """
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    i = 0
    for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
        here = chunk(place, work, sizes.PACKED)
        if here.rows > 0:
            for block in gl.static_range(BLOCKS):
                j = i * BLOCKS + block
                if TWICE:
                    load_pair(bars, sources, tiles, here, block, j, call.group)
                load_states(bars, sources, tiles, place, block, j, sizes)
                if not TWICE:
                    load_pair(bars, sources, tiles, here, block, j, call.group)
                if block == 0:
                    stage = i % sizes.STAGES
                    mbarrier.wait(bars.empty.index(stage), (i // sizes.STAGES & 1) ^ 1)
                    bar = bars.full.index(stage)
                    mbarrier.expect(bar, (6 if TWICE else 4) * C * sizes.V)
                    fetch(sources.loaded.v, here, bar, tiles.loaded.v.index(stage), sizes.V)
                    fetch(sources.loaded.do, here, bar, tiles.loaded.do.index(stage), sizes.V)
                    if TWICE:
                        fetch(sources.loaded.x, here, bar, tiles.loaded.x.index(stage), sizes.V)
            i += 1
