"""``gradients`` with a decay per channel and the delta rule for Hopper, in Gluon: chunks that settle. Extends gradients_channel.py.

Values are what is written, E, and keys read too, with the cotangent -dE. Queries and keys that read are scaled alike, Q̂ = Q ∘ e,
R̂ = K ∘ e, keys that are read K̂ = K / e; with G = dO Eᵀ and N = -dE Eᵀ, both strictly below the diagonal:

    dQ = e ∘ D + own ∘ K,   D = fade dO Sᵀ + G K̂
    dK = e ∘ R + (end E dSᵀ + P) / e + own ∘ Q,   R = -fade dE Sᵀ + N K̂,   P = Gᵀ Q̂ + Nᵀ R̂

One warpgroup has all that reads, D and R: they share e, the state and K̂. The other has what is read. G and N go through shared
memory, where their transposes are too; so does e ∘ R on its way to dK. The decay's gradient adds up Q̂ ∘ D + R̂ ∘ R - K̂ ∘ P and what
is sent, as ever: pairs on one side of a token cancel, as both ends are rounded alike.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton import hopper
from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import chunk, fetch, of_states, ragged, state_at
from linattn.ops.triton.hopper.common import barriers, buffer, give_back, numbers
from linattn.ops.triton.hopper.gradients import away_from_zero
from linattn.ops.triton.hopper.gradients_channel import SLOTS, lay_out, seek, split, strips
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.prepare_channel import BLOCK, WIDE, exp2, in_blocks, left
from linattn.ops.triton.plan import CHANNEL, DELTA, Family
from linattn.ops.triton.tiles import LOG2E


@gluon.jit
def load(bars, sources, buffers, work, group, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr,
         PACKED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Bring tile after tile, ahead of use as far as there is room, in the order in which room comes free."""
    full, empty, pair_full, pair_empty, state_full, state_empty, _, _, _, _, _ = bars
    qd, kd, vd, od, ed, sd, dsd, _, _ = sources
    qb, kb, vb, cotangents, sb, dsb, _, _, _, _, _ = buffers
    ob, eb = cotangents
    places, cu, sequences, tokens, heads = work
    i = 0
    for place in range(gl.program_id(0), places, gl.num_programs(0)):
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        if rows > 0:
            for block in gl.static_range(K // BLOCK):
                j = i * (K // BLOCK) + block
                slot, phase = j % SLOTS, (j // SLOTS & 1) ^ 1
                there = pair_full.index(slot)
                at = [head // group, first + rows, C - rows, block * BLOCK]
                mbarrier.wait(pair_empty.index(slot), phase)
                mbarrier.expect(there, 4 * C * BLOCK)
                tma.load(qd, at, there, qb.index(slot).reshape((1, 1, C, BLOCK)))
                tma.load(kd, at, there, kb.index(slot).reshape((1, 1, C, BLOCK)))
                there = state_full.index(slot)
                mbarrier.wait(state_empty.index(slot), phase)
                mbarrier.expect(there, 4 * BLOCK * V)
                of_state = state_at(place, block * BLOCK, K, V, SPLIT)
                tma.load(sd, of_state, there, sb.index(slot))
                tma.load(dsd, of_state, there, dsb.index(slot))
                if block == 0:
                    stage = i % STAGES
                    here = full.index(stage)
                    mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
                    mbarrier.expect(here, 6 * C * V)
                    fetch(vd, head, first, rows, here, vb.index(stage), C, V)
                    fetch(od, head, first, rows, here, ob.index(stage), C, V)
                    fetch(ed, head, first, rows, here, eb.index(stage), C, V)
            i += 1


@gluon.jit
def summands(state, results, which: gl.constexpr, V: gl.constexpr):
    """Room for a high and a low part of what sums are made of: where the state lay, if that is large enough."""
    if V == 2 * BLOCK:
        tiles = in_blocks(state, BLOCK, V)
        high, low = tiles.index(0), tiles.index(1)
    else:
        high, low = results.index(2 * which), results.index(2 * which + 1)
    return high, low


@gluon.jit
def halves(decays, place, block, work, C: gl.constexpr, PACKED: gl.constexpr):
    """The decays [C / 2, BLOCK] of both halves of a chunk's block, as they lie; 0 past the end. A warp has all tokens of a channel."""
    decay, decay_token, decay_head, split_in = decays
    places, cu, sequences, tokens, heads = work
    HALF: gl.constexpr = C // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, 4], [1, 0])
    head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
    rows = gl.where(place < places, rows, 0)
    stride = decay_token // 4 * 4
    row = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    channel = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    start = decay + first.to(gl.int64) * stride + (head // split_in).to(gl.int64) * (decay_head // 4 * 4)
    where = start + row[:, None] * stride + channel[None, :]
    early = gl.load(where, mask=(row < rows)[:, None], other=0.0)
    return early, gl.load(where + HALF * stride, mask=(row < rows - HALF)[:, None], other=0.0)


@gluon.jit
def add_up(bars, buffers, pick, decays, ddecay, settled, work, group, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
           PACKED: gl.constexpr, DDECAY: gl.constexpr, LOW: gl.constexpr):  # fmt: skip
    """Decays a block ahead, and the decay's gradient: of what is read across a token, what is sent past it, and what passes the chunk."""
    _, _, _, _, state_full, state_empty, _, _, _, sum_full, passed = bars
    _, _, _, _, sb, dsb, high, low, factors, _, results = buffers
    places, cu, sequences, tokens, heads = work
    BLOCKS: gl.constexpr = K // BLOCK
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nought = heads % group  # but no compiler knows: see prepare_channel.py
    row = gl.arange(0, C, gl.SliceLayout(1, WIDE)) + nought
    channel = gl.arange(0, BLOCK, of_channels)
    earlier = left(gl.where(gl.arange(0, C, of_channels)[None, :] < row[:, None], 1.0, 0.0))
    place = seek(gl.program_id(0), work, C, PACKED)
    early, late = halves(decays, place, 0, work, C, PACKED)
    lay_out(early, late, 0, bars, buffers, settled, place, 0, places, C, K, LOW)
    j = 0
    while place < places:
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        next_place = seek(place + gl.num_programs(0), work, C, PACKED)
        for block in range(BLOCKS):
            slot = j % SLOTS
            here_on = pick.index(j * nought).permute((1, 0))
            ahead, next_block = place, block + 1
            if block == BLOCKS - 1:
                ahead, next_block = next_place, 0
            early, late = halves(decays, ahead, next_block, work, C, PACKED)

            mbarrier.wait(state_full.index(slot), j // SLOTS & 1)
            states, dstates = in_blocks(sb.index(slot), BLOCK, V), in_blocks(dsb.index(slot), BLOCK, V)
            both = gl.zeros([BLOCK, BLOCK], gl.float32, of_rows)
            for part in gl.static_range(V // BLOCK):
                both += states.index(part).load(of_rows).to(gl.float32) * dstates.index(part).load(of_rows).to(gl.float32)
            give_back(passed.index(0))
            past = gl.convert_layout(gl.sum(both, 1), of_channels)
            past *= factors.index(3 * slot + 1).load(of_channels) * factors.index(3 * slot + 2).load(of_channels)

            lay_out(early, late, slot ^ 1, bars, buffers, settled, ahead, next_block, places, C, K, LOW)

            read, read_low = summands(sb.index(slot), results, 0, V)
            kept, kept_low = summands(dsb.index(slot), results, 1, V)
            mbarrier.wait(sum_full.index(0), j & 1)
            dd = gl.zeros([C, BLOCK], gl.float32, WIDE)
            dd = warpgroup_mma(earlier, low.index(slot), dd, use_acc=False, is_async=True)
            dd = warpgroup_mma(here_on, read_low, dd, is_async=True)
            dd = warpgroup_mma(here_on, kept_low, dd, is_async=True)
            dd = warpgroup_mma(earlier, high.index(slot), dd, is_async=True)
            dd = warpgroup_mma(here_on, read, dd, is_async=True)
            dd = warpgroup_mma(here_on, kept, dd, is_async=True)
            dd = warpgroup_mma_wait(0, deps=[dd])
            mbarrier.arrive(state_empty.index(slot), count=1)
            if DDECAY:
                dd += past[None, :]
                to = ddecay + (first.to(gl.int64) + row[:, None]) * heads * K + head * K + block * BLOCK + channel[None, :]
                gl.store(to, dd.to(ddecay.dtype.element_ty), mask=(row < rows)[:, None])
            j += 1
        place = next_place


@gluon.jit
def orders(pick, slot, phase, bars, buffers, C: gl.constexpr, LOW: gl.constexpr):
    """Sums of decays up to each token, in flight."""
    _, _, _, _, _, _, decay_full, _, _, _, _ = bars
    _, _, _, _, _, _, high, low, _, _, _ = buffers
    x = gl.zeros([C, BLOCK], gl.float32, WIDE)
    mbarrier.wait(decay_full.index(slot), phase)
    if LOW:
        x = warpgroup_mma(pick, low.index(slot), x, use_acc=False, is_async=True)
        x = warpgroup_mma(pick, high.index(slot), x, is_async=True)
    else:
        x = warpgroup_mma(pick, high.index(slot), x, use_acc=False, is_async=True)
    return x


@gluon.jit
def readers(bars, handed, sources, buffers, between, strengths, work, group, scale, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
            PACKED: gl.constexpr, LOW: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The gradients of queries, and of keys and strengths as far as those read; and what they have in the decay's."""
    full, empty, pair_full, pair_empty, state_full, _, _, scaled, used, sum_full, passed = bars
    read_full, read_empty = handed
    _, _, _, _, _, _, _, dqd, _ = sources
    qb, kb, vb, cotangents, sb, _, _, _, factors, hats, results = buffers
    ob, eb = cotangents
    pick, met, owned = between
    beta, beta_token, beta_head, dbeta, split_in = strengths
    places, cu, sequences, tokens, heads = work
    BLOCKS: gl.constexpr = K // BLOCK
    nought = heads % group  # but no compiler knows, nor keeps in registers where tiles that stay in their place lie
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    of_tokens: gl.constexpr = gl.SliceLayout(1, WIDE)
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    query_hat, key_hat = hats.index(0), hats.index(2)
    i = 0
    for place in range(gl.program_id(0), places, gl.num_programs(0)):
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        if rows > 0:
            stage = i % STAGES
            token = gl.arange(0, C, of_tokens)
            other = gl.arange(0, C, of_channels)[None, :]
            time = first.to(gl.int64) + token
            b = gl.load(beta + time * beta_token + head // split_in * beta_head, mask=token < rows, other=1.0).to(gl.float32)
            mbarrier.wait(full.index(stage), i // STAGES & 1)
            g = warpgroup_mma(ob.index(stage), vb.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            n = warpgroup_mma(eb.index(stage), vb.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            g = warpgroup_mma_wait(1, deps=[g]) * scale
            own = gl.sum(gl.where(token[:, None] == other, g, 0.0), 1)
            owned.store(own)
            met.index(0).store(gl.where(token[:, None] > other, g, 0.0).to(gl.bfloat16))
            n = warpgroup_mma_wait(0, deps=[n])
            strength = gl.sum(gl.where(token[:, None] == other, n, 0.0), 1)
            b = away_from_zero(b)
            gl.store(dbeta + time * heads + head, (strength / (b * b)).to(dbeta.dtype.element_ty), mask=token < rows)
            met.index(1).store(gl.where(token[:, None] > other, -n, 0.0).to(gl.bfloat16))
            for block in range(BLOCKS):
                j = i * BLOCKS + block
                slot, phase, still = j % SLOTS, j // SLOTS & 1, j * nought
                x = orders(pick.index(still), slot, phase, bars, buffers, C, LOW)
                mbarrier.wait(state_full.index(slot), phase)
                d = warpgroup_mma(ob.index(stage + still), sb.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
                r = warpgroup_mma(eb.index(stage + still), sb.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(pair_full.index(slot), phase)
                x = warpgroup_mma_wait(2, deps=[x])
                e = exp2(x * LOG2E - factors.index(3 * slot).load(of_channels)[None, :])
                mbarrier.wait(read_empty.index(0), (j & 1) ^ 1)
                key_hat.store((kb.index(slot).load(WIDE).to(gl.float32) * e).to(gl.bfloat16))
                tma.store_wait(0)  # a gradient takes the place of what it is the gradient of
                query_hat.store((qb.index(slot).load(WIDE).to(gl.float32) * e).to(gl.bfloat16))
                fence_async_shared()
                mbarrier.arrive(scaled.index(0), count=1)
                factor = factors.index(3 * slot + 1).load(of_channels)[None, :]
                d, r = warpgroup_mma_wait(0, deps=[d, r])
                if block == BLOCKS - 1:
                    mbarrier.arrive(empty.index(stage), count=1)
                r = r * -factor
                d = d * (factor * scale)
                mbarrier.wait(scaled.index(1), j & 1)
                r = warpgroup_mma(met.index(still + 1), hats.index(still + 1), r, is_async=True)
                d = warpgroup_mma(met.index(still), hats.index(still + 1), d, is_async=True)
                mbarrier.wait(passed.index(0), j & 1)
                d, r = warpgroup_mma_wait(0, deps=[d, r])
                crossing = key_hat.load(WIDE).to(gl.float32) * r
                crossing += query_hat.load(WIDE).to(gl.float32) * d
                to, to_low = summands(sb.index(slot), results, 0, V)
                split(crossing, to, to_low)
                fence_async_shared()
                mbarrier.arrive(sum_full.index(0), count=1)
                mbarrier.wait(used.index(0), j & 1)
                key_hat.store((r * e).to(gl.bfloat16))
                mbarrier.arrive(read_full.index(0), count=1)
                d = d * e + own[:, None] * kb.index(slot).load(WIDE).to(gl.float32)
                give_back(pair_empty.index(slot))
                query_hat.store(d.to(gl.bfloat16))
                fence_async_shared()
                tma.store(dqd, [head, first + rows, C - rows, block * BLOCK], query_hat.reshape((1, 1, C, BLOCK)))
            i += 1
    tma.store_wait(0)


@gluon.jit
def keys(bars, handed, sources, buffers, between, work, group, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr,
         LOW: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The gradients of keys, and what they have, being read, in the decay's."""
    full, empty, pair_full, pair_empty, state_full, _, _, scaled, used, sum_full, passed = bars
    read_full, read_empty = handed
    _, _, _, _, _, _, _, _, dkd = sources
    qb, kb, vb, _, _, dsb, high, low, factors, hats, results = buffers
    pick, met, owned = between
    places, cu, sequences, tokens, heads = work
    BLOCKS: gl.constexpr = K // BLOCK
    nought = heads % group  # but no compiler knows, nor keeps in registers where tiles that stay in their place lie
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    query_hat, key_hat, hat = hats.index(0), hats.index(2), hats.index(1)
    i = 0
    for place in range(gl.program_id(0), places, gl.num_programs(0)):
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        if rows > 0:
            stage = i % STAGES
            mbarrier.wait(full.index(stage), i // STAGES & 1)
            for block in range(BLOCKS):
                j = i * BLOCKS + block
                slot, phase, still = j % SLOTS, j // SLOTS & 1, j * nought
                x = orders(pick.index(still), slot, phase, bars, buffers, C, LOW)
                mbarrier.wait(state_full.index(slot), phase)
                d = warpgroup_mma(vb.index(stage + still), dsb.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(pair_full.index(slot), phase)
                x = warpgroup_mma_wait(1, deps=[x])
                e = exp2(factors.index(3 * slot).load(of_channels)[None, :] - x * LOG2E)
                tma.store_wait(0)
                hat.store((kb.index(slot).load(WIDE).to(gl.float32) * e).to(gl.bfloat16))
                fence_async_shared()
                mbarrier.arrive(scaled.index(1), count=1)
                factor = factors.index(3 * slot + 2).load(of_channels)[None, :]
                d = warpgroup_mma_wait(0, deps=[d])
                if block == BLOCKS - 1:
                    mbarrier.arrive(empty.index(stage), count=1)
                d = d * factor
                mbarrier.wait(scaled.index(0), j & 1)
                own = owned.load(gl.SliceLayout(1, WIDE))
                part = warpgroup_mma(met.index(still).permute((1, 0)), query_hat, nothing, use_acc=False, is_async=True)
                part = warpgroup_mma(met.index(still + 1).permute((1, 0)), key_hat, part, is_async=True)
                split(hat.load(WIDE).to(gl.float32) * d, high.index(slot), low.index(slot))  # where decays were
                mbarrier.wait(passed.index(0), j & 1)
                part = warpgroup_mma_wait(0, deps=[part])
                mbarrier.arrive(used.index(0), count=1)
                to, to_low = summands(dsb.index(slot), results, 1, V)
                split(-hat.load(WIDE).to(gl.float32) * part, to, to_low)
                fence_async_shared()
                mbarrier.arrive(sum_full.index(0), count=1)
                d = (d + part) * e + own[:, None] * qb.index(slot).load(WIDE).to(gl.float32)
                give_back(pair_empty.index(slot))
                mbarrier.wait(read_full.index(0), j & 1)
                d += key_hat.load(WIDE).to(gl.float32)
                give_back(read_empty.index(0))
                hat.store(d.to(gl.bfloat16))
                fence_async_shared()
                tma.store(dkd, [head, first + rows, C - rows, block * BLOCK], hat.reshape((1, 1, C, BLOCK)))
            i += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "read_token", "read_head", "write_token", "write_head",
    "decay_token", "decay_head", "beta_token", "beta_head", "do_token", "do_head", "sequences", "tokens", "heads", "group", "chunks_before",
])  # fmt: skip
def gradients(
    q, k, v, read, write, decay, beta, bonus, do, cu,
    values, de, states, dstates,
    dq, dk, dread, dwrite, ddecay, dbeta, dbonus, settled,
    q_token, q_head, k_token, k_head, v_token, v_head, read_token, read_head, write_token, write_head, decay_token, decay_head,
    beta_token, beta_head, do_token, do_head,
    sequences, tokens, heads, group, scale, chunks_before,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, DECAY: gl.constexpr, RULE: gl.constexpr,
    BEFORE: gl.constexpr, PACKED: gl.constexpr, BITS: gl.constexpr, PRECISION: gl.constexpr, kind: gl.constexpr,
    SPLIT: gl.constexpr, DDECAY: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, SUMS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    if PACKED:
        chunks = tokens // C + sequences
        length = tokens
    else:
        chunks = (tokens + C - 1) // C * sequences
        length = tokens * sequences
    places = chunks * heads
    work = (places, cu, sequences, tokens, heads)
    key_heads = heads // group
    LOW: gl.constexpr = decay.dtype.element_ty != gl.bfloat16
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, V], gl.bfloat16)
    sources = (
        strips(q, length, q_token, key_heads, q_head, C, K),
        strips(k, length, k_token, key_heads, k_head, C, K),
        ragged(values, length, heads * V, heads, V, C, V),
        ragged(do, length, do_token, heads, do_head, C, V),
        ragged(de, length, heads * V, heads, V, C, V),
        of_states(states, places, K, V, SPLIT, BLOCK, square),
        of_states(dstates, places, K, V, SPLIT, BLOCK, square),
        strips(dq, length, heads * K, heads, K, C, K),
        strips(dk, length, heads * K, heads, K, C, K),
    )
    buffers = (
        buffer(SLOTS, C, BLOCK), buffer(SLOTS, C, BLOCK), buffer(STAGES, C, V), (buffer(STAGES, C, V), buffer(STAGES, C, V)),
        buffer(SLOTS, BLOCK, V), buffer(SLOTS, BLOCK, V), buffer(SLOTS, C, BLOCK), buffer(SLOTS, C, BLOCK),
        numbers(3 * SLOTS, BLOCK, gl.float32), buffer(3, C, BLOCK), None if V == 2 * BLOCK else buffer(4, C, BLOCK),
    )  # fmt: skip
    pick = buffer(1, C, C)  # up to each token
    row = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None]
    pick.index(0).store(gl.where(gl.arange(0, C, gl.SliceLayout(0, WIDE))[None, :] <= row, 1.0, 0.0).to(gl.bfloat16))
    between = (pick, buffer(2, C, C), numbers(1, C, gl.float32).index(0))
    bars = (
        barriers(STAGES, 1), barriers(STAGES, 2),  # values and cotangents: full, empty
        barriers(SLOTS, 1), barriers(SLOTS, 2),  # queries and keys
        barriers(SLOTS, 1), barriers(SLOTS, 1),  # states
        barriers(SLOTS, 1),  # decays
        barriers(2, 1), barriers(1, 1),  # scaled queries and keys that read, keys that are read: made; the former used
        barriers(1, 2), barriers(1, 1),  # the decay's gradient: full, and room for it
    )  # fmt: skip
    handed = (barriers(1, 1), barriers(1, 1))  # keys' reading: full (and keys that are read are used), empty
    fence_async_shared()
    decays = (decay, decay_token, decay_head, SPLIT)
    strengths = (beta, beta_token, beta_head, dbeta, SPLIT)
    gl.warp_specialize([
        (readers, (bars, handed, sources, buffers, between, strengths, work, group, scale, C, K, V, PACKED, LOW, STAGES)),
        (keys, (bars, handed, sources, buffers, between, work, group, C, K, V, PACKED, LOW, STAGES)),
        (add_up, (bars, buffers, pick, decays, ddecay, settled, work, group, C, K, V, PACKED, DDECAY, LOW)),
        (load, (bars, sources, buffers, work, group, C, K, V, SPLIT, PACKED, STAGES)),
    ], [4, 4, 1], [REGISTERS, SUMS, FEW])  # fmt: skip


def fits(family: Family, chunk: int, q: Tensor, k: Tensor, v: Tensor, do: Tensor, decay: Tensor) -> bool:
    """Whether this kernel can do its part of ``gradients.gradients``. A decay's strides may be 0."""
    known = family.half and family.rule == DELTA and family.decay == CHANNEL and not family.before and chunk == hopper.CHUNK
    even = decay.data_ptr() % 16 == 0 and decay.stride(1) % 4 == decay.stride(2) % 4 == 0 and decay.stride(3) == 1
    held = decay.dtype in (torch.bfloat16, torch.float32)
    return known and even and held and hopper.fits((k.shape[3], v.shape[3]), q, k, v, do)


def options(size_v: int) -> dict[str, int]:
    """What the pipeline and the registers of a program are. No more than one program fits a multiprocessor."""
    return dict(STAGES=128 // size_v, num_warps=4, REGISTERS=168, SUMS=136, FEW=24, maxnreg=128)
