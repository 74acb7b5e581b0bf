"""``gradients`` with a decay per channel and the delta rule for Hopper, in Gluon: chunks that settle. Extends settled_plain.py.

Values are the written ones, E, and keys read too, with the cotangent -dE. Queries and reading keys are scaled equally, Q̂ = Q ∘ e,
R̂ = K ∘ e, keys that are read K̂ = K / e; with G = dO Eᵀ and N = -dE Eᵀ, both strictly below the diagonal:

    dQ = e ∘ D + own ∘ K,   D = fade dO Sᵀ + G K̂
    dK = e ∘ R + (end E dSᵀ + P) / e + own ∘ Q,   R = -fade dE Sᵀ + N K̂,   P = Gᵀ Q̂ + Nᵀ R̂

One warpgroup computes the readers, D and R, which share e, the state and K̂; the other the keys that are read. G, N, their transposes
and e ∘ R, a part of dK, pass through shared memory. The decay's gradient sums Q̂ ∘ D + R̂ ∘ R - K̂ ∘ P and the parts past a token: pairs
on one side of a token cancel, because both ends are rounded equally.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.call import Bars, Loaded, Tiles, sources_of
from linattn.ops.triton.hopper.chunks import chunk, send
from linattn.ops.triton.hopper.common import away_from_zero, barriers, buffer, give_back, numbers
from linattn.ops.triton.hopper.decays import columns, halves_at, save_gradients
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import BLOCK, WIDE, C, exp2, held, hold, in_blocks, pick, split, start_sum
from linattn.ops.triton.hopper.settled import SLOTS, any_settles, lay_out, load, passing_chunk, seek
from linattn.ops.triton.tiles import LOG2E


class Between(NamedTuple):
    """Products of queries and keys, shared by the two warpgroups that compute gradients."""

    up_to: Any  # 0/1: the tokens up to each token
    met: Any  # G, N
    owned: Any


@gluon.jit
def summands(state, results, which: gl.constexpr, V: gl.constexpr):
    """Memory for the high and low parts of summands: that of the state if it is large enough."""
    if V == 2 * BLOCK:
        tiles = in_blocks(state, BLOCK, V)
        high, low = tiles.index(0), tiles.index(1)
    else:
        high, low = results.index(2 * which), results.index(2 * which + 1)
    return high, low


@gluon.jit
def add_up(bars, tiles, up_to, work, call, sizes):
    """Prepare decays a block ahead, and sum the decay's gradient: of reads across a token, of writes past it, and of the passing state."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    layout: gl.constexpr = columns(gl.num_warps(), 4)
    zero = work.heads % call.group  # 0, which the compiler cannot know: see prepare_channel.py
    row = gl.arange(0, C, gl.SliceLayout(1, WIDE)) + zero
    earlier = pick(gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :] < row[:, None])
    place = seek(gl.program_id(0), work, sizes.PACKED)
    early, late = halves_at(call.decays, place, 0, work, sizes, layout)
    lay_out(early, late, 0, bars, tiles, sizes)
    j = 0
    while place < work.places:
        here = chunk(place, work, sizes.PACKED)
        next_place = seek(place + gl.num_programs(0), work, sizes.PACKED)
        for block in range(BLOCKS):
            slot = j % SLOTS
            here_on = up_to.index(j * zero).permute((1, 0))
            ahead, next_block = place, block + 1
            if block == BLOCKS - 1:
                ahead, next_block = next_place, 0
            early, late = halves_at(call.decays, ahead, next_block, work, sizes, layout)
            past = passing_chunk(bars, tiles, bars.sum_empty, 0, j, sizes.V)
            lay_out(early, late, slot ^ 1, bars, tiles, sizes)

            read, read_low = summands(tiles.loaded.states.index(slot), tiles.sums, 0, sizes.V)
            kept, kept_low = summands(tiles.loaded.dstates.index(slot), tiles.sums, 1, sizes.V)
            mbarrier.wait(bars.sum_full.index(0), j & 1)
            dd = gl.zeros([C, BLOCK], gl.float32, WIDE)
            dd = warpgroup_mma(earlier, tiles.low.index(slot), dd, use_acc=False, is_async=True)
            dd = warpgroup_mma(here_on, read_low, dd, is_async=True)
            dd = warpgroup_mma(here_on, kept_low, dd, is_async=True)
            dd = warpgroup_mma(earlier, tiles.high.index(slot), dd, is_async=True)
            dd = warpgroup_mma(here_on, read, dd, is_async=True)
            dd = warpgroup_mma(here_on, kept, dd, is_async=True)
            dd = warpgroup_mma_wait(0, deps=[dd])
            mbarrier.arrive(bars.state_empty.index(slot), count=1)
            if sizes.DDECAY:
                save_gradients(call.ddecay, dd + past[None, :], here, row[:, None], block, work, sizes.K)
            j += 1
        place = next_place


@gluon.jit
def readers(bars, sources, tiles, between, work, call, sizes):
    """Compute the gradients of queries, of reading keys and strengths, and their part of the decay's."""
    room = tiles.loaded
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    strengths, factors, hats, met = call.strengths, tiles.factors, tiles.hats, between.met
    zero = work.heads % call.group  # 0, unknown to the compiler, so that addresses of tiles are not kept in registers
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    of_tokens: gl.constexpr = gl.SliceLayout(1, WIDE)
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    query_hat, key_hat = hats.index(0), hats.index(2)
    i = 0
    for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
        here = chunk(place, work, sizes.PACKED)
        if here.rows > 0:
            stage = i % sizes.STAGES
            token = gl.arange(0, C, of_tokens)
            other = gl.arange(0, C, of_channels)[None, :]
            time = here.first.to(gl.int64) + token
            inside = token < here.rows
            of_head = strengths.base + time * strengths.token + here.head // strengths.split * strengths.head
            b = gl.load(of_head, mask=inside, other=1.0).to(gl.float32)
            mbarrier.wait(bars.full.index(stage), i // sizes.STAGES & 1)
            g = warpgroup_mma(room.do.index(stage), room.v.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            n = warpgroup_mma(room.x.index(stage), room.v.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            g = warpgroup_mma_wait(1, deps=[g]) * call.scale
            own = gl.sum(gl.where(token[:, None] == other, g, 0.0), 1)
            between.owned.store(own)
            hold(met.index(0), gl.where(token[:, None] > other, g, 0.0))
            n = warpgroup_mma_wait(0, deps=[n])
            strength = gl.sum(gl.where(token[:, None] == other, n, 0.0), 1)
            b = away_from_zero(b)
            where = strengths.to + time * work.heads + here.head
            gl.store(where, (strength / (b * b)).to(strengths.to.dtype.element_ty), mask=inside)
            hold(met.index(1), gl.where(token[:, None] > other, -n, 0.0))
            for block in range(BLOCKS):
                j = i * BLOCKS + block
                slot, phase, still = j % SLOTS, j // SLOTS & 1, j * zero
                up_to = between.up_to.index(still)
                mbarrier.wait(bars.decay_full.index(slot), phase)
                x = start_sum(up_to, tiles.high, tiles.low, slot, sizes.LOW)
                mbarrier.wait(bars.state_full.index(slot), phase)
                do, x_tile, states = room.do, room.x, room.states
                d = warpgroup_mma(do.index(stage + still), states.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
                r = warpgroup_mma(x_tile.index(stage + still), states.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(bars.pair_full.index(slot), phase)
                x = warpgroup_mma_wait(2, deps=[x])
                e = exp2(x * LOG2E - factors.index(2 * slot).load(of_channels)[None, :])
                mbarrier.wait(bars.read_empty.index(0), (j & 1) ^ 1)
                hold(key_hat, held(room.k.index(slot)) * e)
                tma.store_wait(0)  # a gradient aliases its operand
                hold(query_hat, held(room.q.index(slot)) * e)
                fence_async_shared()
                mbarrier.arrive(bars.scaled.index(0), count=1)
                factor = factors.index(2 * slot + 1).load(of_channels)[None, :]
                d, r = warpgroup_mma_wait(0, deps=[d, r])
                if block == BLOCKS - 1:
                    mbarrier.arrive(bars.empty.index(stage), count=1)
                r = r * -factor
                d = d * (factor * call.scale)
                mbarrier.wait(bars.scaled.index(1), j & 1)
                r = warpgroup_mma(met.index(still + 1), hats.index(still + 1), r, is_async=True)
                d = warpgroup_mma(met.index(still), hats.index(still + 1), d, is_async=True)
                mbarrier.wait(bars.sum_empty.index(0), j & 1)
                d, r = warpgroup_mma_wait(0, deps=[d, r])
                crossing = held(key_hat) * r
                crossing += held(query_hat) * d
                to, to_low = summands(room.states.index(slot), tiles.sums, 0, sizes.V)
                split(crossing, to, to_low)
                fence_async_shared()
                mbarrier.arrive(bars.sum_full.index(0), count=1)
                mbarrier.wait(bars.used.index(0), j & 1)
                hold(key_hat, r * e)
                mbarrier.arrive(bars.read_full.index(0), count=1)
                d = d * e + own[:, None] * held(room.k.index(slot))
                give_back(bars.pair_empty.index(slot))
                hold(query_hat, d)
                fence_async_shared()
                send(sources.dq, here, block, query_hat)
            i += 1
    tma.store_wait(0)


@gluon.jit
def keys(bars, sources, tiles, between, work, call, sizes):
    """Compute the gradients of keys, and the part of the decay's from keys that are read."""
    room = tiles.loaded
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    factors, hats, met = tiles.factors, tiles.hats, between.met
    zero = work.heads % call.group  # 0, unknown to the compiler, so that addresses of tiles are not kept in registers
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    query_hat, key_hat, hat = hats.index(0), hats.index(2), hats.index(1)
    i = 0
    for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
        here = chunk(place, work, sizes.PACKED)
        if here.rows > 0:
            stage = i % sizes.STAGES
            mbarrier.wait(bars.full.index(stage), i // sizes.STAGES & 1)
            for block in range(BLOCKS):
                j = i * BLOCKS + block
                slot, phase, still = j % SLOTS, j // SLOTS & 1, j * zero
                up_to = between.up_to.index(still)
                mbarrier.wait(bars.decay_full.index(slot), phase)
                x = start_sum(up_to, tiles.high, tiles.low, slot, sizes.LOW)
                mbarrier.wait(bars.state_full.index(slot), phase)
                v_tile, dstate = room.v.index(stage + still), room.dstates.index(slot).permute((1, 0))
                d = warpgroup_mma(v_tile, dstate, nothing, use_acc=False, is_async=True)
                mbarrier.wait(bars.pair_full.index(slot), phase)
                x = warpgroup_mma_wait(1, deps=[x])
                e = exp2(factors.index(2 * slot).load(of_channels)[None, :] - x * LOG2E)
                tma.store_wait(0)
                hold(hat, held(room.k.index(slot)) * e)
                fence_async_shared()
                mbarrier.arrive(bars.scaled.index(1), count=1)
                factor = factors.index(2 * slot + 1).load(of_channels)[None, :]
                d = warpgroup_mma_wait(0, deps=[d])
                if block == BLOCKS - 1:
                    mbarrier.arrive(bars.empty.index(stage), count=1)
                d = d * factor
                mbarrier.wait(bars.scaled.index(0), j & 1)
                own = between.owned.load(gl.SliceLayout(1, WIDE))
                part = warpgroup_mma(met.index(still).permute((1, 0)), query_hat, nothing, use_acc=False, is_async=True)
                part = warpgroup_mma(met.index(still + 1).permute((1, 0)), key_hat, part, is_async=True)
                split(held(hat) * d, tiles.high.index(slot), tiles.low.index(slot))  # aliases decays
                mbarrier.wait(bars.sum_empty.index(0), j & 1)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(bars.used.index(0), count=1)
                to, to_low = summands(room.dstates.index(slot), tiles.sums, 1, sizes.V)
                split(-held(hat) * part, to, to_low)
                fence_async_shared()
                mbarrier.arrive(bars.sum_full.index(0), count=1)
                d = (d + part) * e + own[:, None] * held(room.q.index(slot))
                give_back(bars.pair_empty.index(slot))
                mbarrier.wait(bars.read_full.index(0), j & 1)
                d += held(key_hat)
                give_back(bars.read_empty.index(0))
                hold(hat, d)
                fence_async_shared()
                send(sources.dk, here, block, hat)
            i += 1
    tma.store_wait(0)


@gluon.jit
def gradients(call, work, sizes, REGISTERS: gl.constexpr, SUMS: gl.constexpr, FEW: gl.constexpr):
    """Compute all gradients of this program's chunks, unless no block of channels settles in any."""
    if any_settles(work, call, sizes):
        compute(call, work, sizes, REGISTERS, SUMS, FEW)


@gluon.jit
def compute(call, work, sizes, REGISTERS: gl.constexpr, SUMS: gl.constexpr, FEW: gl.constexpr):
    V: gl.constexpr = sizes.V
    STAGES: gl.constexpr = sizes.STAGES
    sources = sources_of(call, work, sizes, BLOCK)
    room = Loaded(
        buffer(SLOTS, C, BLOCK), buffer(SLOTS, C, BLOCK), buffer(STAGES, C, V), buffer(STAGES, C, V), buffer(STAGES, C, V),
        buffer(SLOTS, BLOCK, V), buffer(SLOTS, BLOCK, V),
    )  # fmt: skip
    high, low, factors = buffer(SLOTS, C, BLOCK), buffer(SLOTS, C, BLOCK), numbers(2 * SLOTS, BLOCK, gl.float32)
    tiles = Tiles(room, high, low, factors, buffer(3, C, BLOCK), None if V == 2 * BLOCK else buffer(4, C, BLOCK))
    up_to = buffer(1, C, C)
    row = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None]
    hold(up_to.index(0), gl.where(gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :] <= row, 1.0, 0.0))
    met, owned = buffer(2, C, C), numbers(1, C, gl.float32).index(0)
    bars = Bars(
        barriers(STAGES, 1), barriers(STAGES, 2), barriers(SLOTS, 1), barriers(SLOTS, 2), barriers(SLOTS, 1), barriers(SLOTS, 1),
        barriers(SLOTS, 1), None, barriers(2, 1), barriers(1, 1), barriers(1, 2), barriers(1, 1), barriers(1, 1), barriers(1, 1),
    )  # fmt: skip
    between = Between(up_to, met, owned)
    fence_async_shared()
    gl.warp_specialize([
        (readers, (bars, sources, tiles, between, work, call, sizes)),
        (keys, (bars, sources, tiles, between, work, call, sizes)),
        (add_up, (bars, tiles, up_to, work, call, sizes)),
        (load, (bars, sources, tiles, work, call, sizes, True)),
    ], [4, 4, 1], [REGISTERS, SUMS, FEW])  # fmt: skip


def options(size_v: int) -> dict[str, int]:
    """Pipeline depth and registers of a program. A multiprocessor runs one program at a time."""
    return dict(STAGES=128 // size_v, num_warps=4, REGISTERS=168, SUMS=144, FEW=24, maxnreg=128)
