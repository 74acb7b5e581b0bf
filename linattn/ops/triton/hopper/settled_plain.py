"""``gradients`` with a decay per channel for Hopper, in Gluon: plain rule, chunks that settle. Persistent programs, as whole.py.

Where a chunk settles (see tiles.py) queries and keys scaled to its middle, Q̂ = Q ∘ e and K̂ = K / e, have no decay between them:

    dQ = e ∘ (fade dO Sᵀ + (dO Vᵀ below) K̂) + own ∘ K        dK = (end V dSᵀ + (V dOᵀ above) Q̂) / e + own ∘ Q

``fade`` and ``end``, by channel, are the decays of the state up to the middle and after it, ``own`` is the diagonal of dO Vᵀ. The
decay's gradient sums rows of Q̂ ∘ (…) and K̂ ∘ (…), in which pairs on one side of a token cancel: they have the same factors, rounded
equally. Pairs without a decay between them are not part of it.

A program processes blocks of 64 channels, chunk after chunk. One warpgroup computes the gradients of queries, one those of keys, mirror
images; a third prepares decays for products and sums the decay's gradient; one warp prefetches. All chunks are computed; ``settled``
flags the blocks of channels whose results are exact; levels_plain.py computes the others.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.call import Bars, Loaded, Tiles, sources_of
from linattn.ops.triton.hopper.chunks import chunk, send
from linattn.ops.triton.hopper.common import SHARED, barriers, buffer, give_back, numbers
from linattn.ops.triton.hopper.decays import ROWS, halves_at, save_gradients
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import BLOCK, WIDE, C, exp2, held, hold, left, pick, split, start_sum
from linattn.ops.triton.hopper.settled import SLOTS, any_settles, lay_out, load, passing_chunk, seek
from linattn.ops.triton.tiles import LOG2E


@gluon.jit
def add_up(bars, tiles, work, call, sizes):
    """Prepare decays a block ahead, and sum the decay's gradient: of reads across a token, of writes past it, and of the passing state."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    high, low, sums = tiles.high, tiles.low, tiles.sums
    zero = work.heads % call.group  # 0, unknown to the compiler: see prepare_channel.py
    row = gl.arange(0, C, gl.SliceLayout(1, WIDE)) + zero
    other = gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :]
    here_on = pick(other >= row[:, None])
    later = here_on
    if sizes.BEFORE:
        later = pick(other > row[:, None])
    earlier = pick(other < row[:, None])
    place = seek(gl.program_id(0), work, sizes.PACKED)
    early, late = halves_at(call.decays, place, 0, work, sizes, ROWS)
    lay_out(early, late, 0, bars, tiles, sizes)
    j = 0
    while place < work.places:
        here = chunk(place, work, sizes.PACKED)
        next_place = seek(place + gl.num_programs(0), work, sizes.PACKED)
        for block in range(BLOCKS):
            slot = j % SLOTS
            ahead, next_block = place, block + 1
            if block == BLOCKS - 1:
                ahead, next_block = next_place, 0
            early, late = halves_at(call.decays, ahead, next_block, work, sizes, ROWS)
            past = passing_chunk(bars, tiles, bars.state_empty, slot, j, sizes.V)
            lay_out(early, late, slot ^ 1, bars, tiles, sizes)

            mbarrier.wait(bars.sum_full.index(0), j & 1)
            dd = gl.zeros([C, BLOCK], gl.float32, WIDE)
            dd = warpgroup_mma(earlier, low.index(slot), dd, use_acc=False, is_async=True)
            dd = warpgroup_mma(later, sums.index(1), dd, is_async=True)
            dd = warpgroup_mma(here_on, sums.index(3), dd, is_async=True)
            dd = warpgroup_mma(earlier, high.index(slot), dd, is_async=True)
            dd = warpgroup_mma(later, sums.index(0), dd, is_async=True)
            dd = warpgroup_mma(here_on, sums.index(2), dd, is_async=True)
            dd = warpgroup_mma_wait(0, deps=[dd])
            mbarrier.arrive(bars.sum_empty.index(0), count=1)
            if sizes.DDECAY:
                save_gradients(call.ddecay, dd + past[None, :], here, row[:, None], block, work, sizes.K)
            j += 1
        place = next_place


@gluon.jit
def side(READS: gl.constexpr, bars, sources, tiles, bonus, work, call, sizes):
    """Compute the gradients of queries (``READS``) or of keys, and their part of the decay's."""
    room = tiles.loaded
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    mine: gl.constexpr = 0 if READS else 1
    theirs: gl.constexpr = 1 - mine
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    high, low, factors, sums = tiles.high, tiles.low, tiles.factors, tiles.sums
    zero = work.heads % call.group  # 0, unknown to the compiler: see prepare_channel.py
    token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + zero
    other = gl.arange(0, C, of_channels)[None, :]
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    up_to = pick(other < token if sizes.BEFORE and READS else other <= token)
    i = 0
    for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
        here = chunk(place, work, sizes.PACKED)
        if here.rows > 0:
            stage = i % sizes.STAGES
            cotangent, value = room.do.index(stage), room.v.index(stage)
            if not READS:
                cotangent, value = value, cotangent
            mbarrier.wait(bars.full.index(stage), i // sizes.STAGES & 1)
            g = warpgroup_mma(cotangent, value.permute((1, 0)), nothing, use_acc=False, is_async=True)
            g = warpgroup_mma_wait(0, deps=[g]) * call.scale
            own = gl.sum(gl.where(token == other, g, 0.0), 1)[:, None]
            nearest = other + 1 if READS else other - 1
            near = g
            if sizes.BEFORE:  # there is no decay between neighbours
                near = left(gl.where(token == nearest, g, 0.0))
                g = left(gl.where(token > nearest if READS else token < nearest, g, 0.0))
            else:
                g = left(gl.where(token > other if READS else token < other, g, 0.0))
            for block in range(BLOCKS):
                j = i * BLOCKS + block
                slot, phase = j % SLOTS, j // SLOTS & 1
                vector, partner = (room.q.index(slot), room.k.index(slot)) if READS else (room.k.index(slot), room.q.index(slot))
                hat, met = tiles.hats.index(mine), tiles.hats.index(theirs)
                state = (room.states if READS else room.dstates).index(slot)
                channel = gl.arange(0, BLOCK, of_channels)

                mbarrier.wait(bars.decay_full.index(slot), phase)
                x = start_sum(up_to, high, low, slot, sizes.LOW)
                mbarrier.wait(bars.state_full.index(slot), phase)
                d = warpgroup_mma(cotangent, state.permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(bars.pair_full.index(slot), phase)
                x = warpgroup_mma_wait(1, deps=[x])
                x = x * LOG2E - factors.index(2 * slot).load(of_channels)[None, :]
                e = exp2(x if READS else -x)
                tma.store_wait(0)  # a gradient aliases its operand
                hold(hat, held(vector) * e)
                fence_async_shared()
                mbarrier.arrive(bars.scaled.index(mine), count=1)
                factor = factors.index(2 * slot + 1).load(of_channels)[None, :]
                d = warpgroup_mma_wait(0, deps=[d])
                mbarrier.arrive(bars.state_empty.index(slot), count=1)
                mbarrier.arrive(bars.empty.index(stage), count=1, pred=block == BLOCKS - 1)
                d = d * (factor * call.scale if READS else factor)
                mbarrier.wait(bars.scaled.index(theirs), j & 1)
                if READS:
                    d = warpgroup_mma(g, met, d, is_async=True)
                    mbarrier.wait(bars.sum_empty.index(0), (j & 1) ^ 1)
                    d = warpgroup_mma_wait(0, deps=[d])
                    split(held(hat) * d, sums.index(0), sums.index(1))
                else:
                    split(held(hat) * d, high.index(slot), low.index(slot))  # aliases decays
                    part = warpgroup_mma(g, met, nothing, use_acc=False, is_async=True)
                    mbarrier.wait(bars.sum_empty.index(0), (j & 1) ^ 1)
                    part = warpgroup_mma_wait(0, deps=[part])
                    split(-held(hat) * part, sums.index(2), sums.index(3))
                    d += part
                fence_async_shared()
                mbarrier.arrive(bars.sum_full.index(0), count=1)
                if sizes.BEFORE:
                    d = warpgroup_mma(near, met, d, is_async=True)
                    d = warpgroup_mma_wait(0, deps=[d])
                mbarrier.arrive(bars.used.index(theirs), count=1)
                other_vectors = held(partner)
                if sizes.BEFORE:
                    u = gl.load(bonus + here.head // sizes.SPLIT * sizes.K + block * BLOCK + channel).to(gl.float32)[None, :]
                    if READS:
                        of_bonus = gl.sum(own * held(vector) * other_vectors, 0)
                        gl.store(call.dbonus + place * sizes.K + block * BLOCK + channel, of_bonus)
                    other_vectors = other_vectors * u
                give_back(bars.pair_empty.index(slot))
                d = d * e + own * other_vectors
                mbarrier.wait(bars.used.index(mine), j & 1)
                hold(hat, d)
                fence_async_shared()
                send(sources.dq if READS else sources.dk, here, block, hat)
            i += 1
    tma.store_wait(0)


@gluon.jit
def gradients(call, work, sizes, REGISTERS: gl.constexpr, SUMS: gl.constexpr, FEW: gl.constexpr):
    """Compute all gradients of this program's chunks, unless no block of channels settles in any."""
    if any_settles(work, call, sizes):
        compute(call, work, sizes, REGISTERS, SUMS, FEW)


@gluon.jit
def compute(call, work, sizes, REGISTERS: gl.constexpr, SUMS: gl.constexpr, FEW: gl.constexpr):
    STAGES: gl.constexpr = sizes.STAGES
    sources = sources_of(call, work, sizes, BLOCK)
    room = Loaded(
        buffer(SLOTS, C, BLOCK), buffer(SLOTS, C, BLOCK), buffer(STAGES, C, sizes.V), buffer(STAGES, C, sizes.V), None,
        buffer(SLOTS, BLOCK, sizes.V), buffer(SLOTS, BLOCK, sizes.V),
    )  # fmt: skip
    high, low = buffer(SLOTS, C, BLOCK), buffer(SLOTS, C, BLOCK)
    tiles = Tiles(room, high, low, numbers(2 * SLOTS, BLOCK, gl.float32), buffer(2, C, BLOCK), buffer(4, C, BLOCK))
    bars = Bars(
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(SLOTS, 1), barriers(SLOTS, 2), barriers(SLOTS, 1), barriers(SLOTS, 3),
        barriers(SLOTS, 1), None, barriers(2, 1), barriers(2, 1), barriers(1, 2), barriers(1, 1),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (side, (True, bars, sources, tiles, call.bonus, work, call, sizes)),
        (side, (False, bars, sources, tiles, call.bonus, work, call, sizes)),
        (add_up, (bars, tiles, work, call, sizes)),
        (load, (bars, sources, tiles, work, call, sizes, False)),
    ], [4, 4, 1], [REGISTERS, SUMS, FEW])  # fmt: skip


def options(size_v: int) -> dict[str, int]:
    """Pipeline depth and registers of a program. A multiprocessor runs one program at a time."""
    rest = 116 * 1024 + 512 * size_v  # bytes: everything but values and cotangents
    stages = min(2, (SHARED - rest) // (256 * size_v))
    return dict(STAGES=stages, num_warps=4, REGISTERS=176, SUMS=136, FEW=40, maxnreg=128)
