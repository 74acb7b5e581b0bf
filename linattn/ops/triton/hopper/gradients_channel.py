"""``gradients`` with a decay per channel for Hopper, in Gluon: plain rule, chunks that settle. Persistent programs, as gradients.py.

Where a chunk settles (see tiles.py) queries and keys scaled to its middle, Q̂ = Q ∘ e and K̂ = K / e, know no decay of each other:

    dQ = e ∘ (fade dO Sᵀ + (dO Vᵀ below) K̂) + own ∘ K        dK = (end V dSᵀ + (V dOᵀ above) Q̂) / e + own ∘ Q

``fade`` and ``end``, a number a channel, are what the state fades by up to the middle and from there on, ``own`` is the diagonal of
dO Vᵀ. The decay's gradient adds up rows of Q̂ ∘ (…) and K̂ ∘ (…), between which pairs on one side of a token cancel: they have the
same factors, rounded alike. What has no decay within stays out of it.

A program takes 64 channels after 64 channels of chunk after chunk. One warpgroup makes the gradients of queries, one those of keys,
mirror images; a third makes decays ready for their products and adds up the decay's gradient; one warp loads ahead. All chunks pass;
``settled`` says for which blocks of channels what they left holds, the others are somebody else's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton import hopper
from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import chunk, fetch, of_states, ragged, state_at
from linattn.ops.triton.hopper.common import SHARED, barriers, buffer, give_back, numbers
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.prepare_channel import BLOCK, NATURAL_RESET, WIDE, add_two, exp2, in_blocks, keep, left
from linattn.ops.triton.plan import CHANNEL, PLAIN, Family
from linattn.ops.triton.tiles import LOG2E, TAME

SLOTS = gl.constexpr(2)  # blocks of channels at hand


@gluon.jit
def strips(base, rows, token, heads, head, C: gl.constexpr, K: gl.constexpr):
    """Tiles [C, BLOCK] of the K channels, otherwise as ``ragged``."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, C, BLOCK], gl.bfloat16)
    base -= C * token.to(gl.int64)
    return tma.describe(base, [heads, rows + 1, C, K], [head, token, token, 1], [1, 1, C, BLOCK], layout)


@gluon.jit
def load(bars, sources, buffers, work, group, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr,
         PACKED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Bring tile after tile, ahead of use as far as there is room, in the order in which room comes free."""
    full, empty, pair_full, pair_empty, state_full, state_empty, _, _, _, _, _ = bars
    qd, kd, vd, od, sd, dsd, _, _ = sources
    qb, kb, vb, ob, sb, dsb, _, _, _, _, _ = buffers
    places, cu, sequences, tokens, heads = work
    i = 0
    for place in range(gl.program_id(0), places, gl.num_programs(0)):
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        if rows > 0:
            for block in gl.static_range(K // BLOCK):
                j = i * (K // BLOCK) + block
                slot, phase = j % SLOTS, (j // SLOTS & 1) ^ 1
                there = state_full.index(slot)
                mbarrier.wait(state_empty.index(slot), phase)
                mbarrier.expect(there, 4 * BLOCK * V)
                of_state = state_at(place, block * BLOCK, K, V, SPLIT)
                tma.load(sd, of_state, there, sb.index(slot))
                tma.load(dsd, of_state, there, dsb.index(slot))
                there = pair_full.index(slot)
                at = [head // group, first + rows, C - rows, block * BLOCK]
                mbarrier.wait(pair_empty.index(slot), phase)
                mbarrier.expect(there, 4 * C * BLOCK)
                tma.load(qd, at, there, qb.index(slot).reshape((1, 1, C, BLOCK)))
                tma.load(kd, at, there, kb.index(slot).reshape((1, 1, C, BLOCK)))
                if block == 0:
                    stage = i % STAGES
                    mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
                    mbarrier.expect(full.index(stage), 4 * C * V)
                    fetch(vd, head, first, rows, full.index(stage), vb.index(stage), C, V)
                    fetch(od, head, first, rows, full.index(stage), ob.index(stage), C, V)
            i += 1


@gluon.jit
def split(a, high, low):
    """Leave ``a`` in shared memory for products, as two numbers of bfloat16."""
    top = a.to(gl.bfloat16)
    low.store((a - top.to(gl.float32)).to(gl.bfloat16))
    high.store(top)


@gluon.jit
def halves(decays, place, block, work, C: gl.constexpr, PACKED: gl.constexpr):
    """The decays [C / 2, BLOCK] of both halves of a chunk's block, as they lie; 0 past the end."""
    decay, decay_token, decay_head, split_in = decays
    places, cu, sequences, tokens, heads = work
    HALF: gl.constexpr = C // 2
    layout: gl.constexpr = gl.BlockedLayout([HALF * BLOCK // 512, 4], [128 // BLOCK, BLOCK // 4], [4, 1], [1, 0])
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
def lay_out(early, late, slot, bars, buffers, settled, place, block, places, C: gl.constexpr, K: gl.constexpr, LOW: gl.constexpr):
    """Make a block's decays ready: tiles for sums, and by channel orders up to the middle, the weight up to there and from there on."""
    _, _, _, _, _, _, decay_full, _, _, _, _ = bars
    _, _, _, _, _, _, high, low, factors, _, _ = buffers
    early = gl.maximum(early.to(gl.float32), NATURAL_RESET)
    late = gl.maximum(late.to(gl.float32), NATURAL_RESET)
    tiles = (high.index(slot), low.index(slot) if LOW else None)
    keep(early, tiles, 0, C // 2)
    keep(late, tiles, C // 2, C // 2)
    of_early, of_late = gl.reduce((early, late), 0, add_two)
    to_middle = of_early * LOG2E
    to_end = of_late * LOG2E
    nearest = gl.min(gl.minimum(to_middle, to_end), 0)
    factors.index(3 * slot).store(to_middle)
    factors.index(3 * slot + 1).store(exp2(to_middle))
    factors.index(3 * slot + 2).store(exp2(to_end))
    fence_async_shared()
    mbarrier.arrive(decay_full.index(slot), count=1)
    if place < places:
        gl.store(settled + place * (K // BLOCK) + block, (nearest >= -TAME).to(gl.int32))


@gluon.jit
def seek(place, work, C: gl.constexpr, PACKED: gl.constexpr):
    """The first chunk of this program from ``place`` on that has tokens."""
    places, cu, sequences, tokens, heads = work
    if PACKED:
        _, _, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        while (place < places) & (rows <= 0):
            place += gl.num_programs(0)
            _, _, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
    return place


@gluon.jit
def add_up(bars, buffers, decays, ddecay, settled, work, group, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BEFORE: gl.constexpr,
           PACKED: gl.constexpr, DDECAY: gl.constexpr, LOW: gl.constexpr):  # fmt: skip
    """Decays a block ahead, and the decay's gradient: of what is read across a token, what is sent past it, and what passes the chunk."""
    _, _, _, _, state_full, state_empty, _, _, _, sum_full, sum_empty = bars
    _, _, _, _, sb, dsb, high, low, factors, _, results = buffers
    places, cu, sequences, tokens, heads = work
    BLOCKS: gl.constexpr = K // BLOCK
    of_rows: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nought = heads % group  # but no compiler knows: see prepare_channel.py
    row = gl.arange(0, C, gl.SliceLayout(1, WIDE)) + nought
    other = gl.arange(0, C, of_channels)[None, :]
    channel = gl.arange(0, BLOCK, of_channels)
    here_on = left(gl.where(other >= row[:, None], 1.0, 0.0))
    later = here_on
    if BEFORE:
        later = left(gl.where(other > row[:, None], 1.0, 0.0))
    earlier = left(gl.where(other < row[:, None], 1.0, 0.0))
    place = seek(gl.program_id(0), work, C, PACKED)
    early, late = halves(decays, place, 0, work, C, PACKED)
    lay_out(early, late, 0, bars, buffers, settled, place, 0, places, C, K, LOW)
    j = 0
    while place < places:
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        next_place = seek(place + gl.num_programs(0), work, C, PACKED)
        for block in range(BLOCKS):
            slot = j % SLOTS
            ahead, next_block = place, block + 1
            if block == BLOCKS - 1:
                ahead, next_block = next_place, 0
            early, late = halves(decays, ahead, next_block, work, C, PACKED)

            mbarrier.wait(state_full.index(slot), j // SLOTS & 1)
            states, dstates = in_blocks(sb.index(slot), BLOCK, V), in_blocks(dsb.index(slot), BLOCK, V)
            both = gl.zeros([BLOCK, BLOCK], gl.float32, of_rows)
            for part in gl.static_range(V // BLOCK):
                both += states.index(part).load(of_rows).to(gl.float32) * dstates.index(part).load(of_rows).to(gl.float32)
            give_back(state_empty.index(slot))
            past = gl.convert_layout(gl.sum(both, 1), of_channels)
            past *= factors.index(3 * slot + 1).load(of_channels) * factors.index(3 * slot + 2).load(of_channels)

            lay_out(early, late, slot ^ 1, bars, buffers, settled, ahead, next_block, places, C, K, LOW)

            mbarrier.wait(sum_full.index(0), j & 1)
            dd = gl.zeros([C, BLOCK], gl.float32, WIDE)
            dd = warpgroup_mma(earlier, low.index(slot), dd, use_acc=False, is_async=True)
            dd = warpgroup_mma(later, results.index(1), dd, is_async=True)
            dd = warpgroup_mma(here_on, results.index(3), dd, is_async=True)
            dd = warpgroup_mma(earlier, high.index(slot), dd, is_async=True)
            dd = warpgroup_mma(later, results.index(0), dd, is_async=True)
            dd = warpgroup_mma(here_on, results.index(2), dd, is_async=True)
            dd = warpgroup_mma_wait(0, deps=[dd])
            mbarrier.arrive(sum_empty.index(0), count=1)
            if DDECAY:
                dd += past[None, :]
                to = ddecay + (first.to(gl.int64) + row[:, None]) * heads * K + head * K + block * BLOCK + channel[None, :]
                gl.store(to, dd.to(ddecay.dtype.element_ty), mask=(row < rows)[:, None])
            j += 1
        place = next_place


@gluon.jit
def side(
    READS: gl.constexpr, bars, sources, buffers, bonus, dbonus, work, group, scale,
    C: gl.constexpr, K: gl.constexpr, SPLIT: gl.constexpr, BEFORE: gl.constexpr, PACKED: gl.constexpr, LOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The gradients of queries (``READS``) or of keys, and both sides' parts in the decay's."""
    full, empty, pair_full, pair_empty, state_full, state_empty, decay_full, scaled, used, sum_full, sum_empty = bars
    _, _, _, _, _, _, dqd, dkd = sources
    qb, kb, vb, ob, sb, dsb, high, low, factors, hats, results = buffers
    places, cu, sequences, tokens, heads = work
    BLOCKS: gl.constexpr = K // BLOCK
    mine: gl.constexpr = 0 if READS else 1
    theirs: gl.constexpr = 1 - mine
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    nought = heads % group  # but no compiler knows: see prepare_channel.py
    token = gl.arange(0, C, gl.SliceLayout(1, WIDE))[:, None] + nought
    other = gl.arange(0, C, of_channels)[None, :]
    nothing = gl.zeros([C, C], gl.float32, WIDE)
    pick = left(gl.where(other < token if BEFORE and READS else other <= token, 1.0, 0.0))
    i = 0
    for place in range(gl.program_id(0), places, gl.num_programs(0)):
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        if rows > 0:
            stage = i % STAGES
            cotangent, value = (ob.index(stage), vb.index(stage)) if READS else (vb.index(stage), ob.index(stage))
            mbarrier.wait(full.index(stage), i // STAGES & 1)
            g = warpgroup_mma(cotangent, value.permute((1, 0)), nothing, use_acc=False, is_async=True)
            g = warpgroup_mma_wait(0, deps=[g]) * scale
            own = gl.sum(gl.where(token == other, g, 0.0), 1)[:, None]
            nearest = other + 1 if READS else other - 1
            near = g
            if BEFORE:  # neighbours have no decay between them
                near = left(gl.where(token == nearest, g, 0.0))
                g = left(gl.where(token > nearest if READS else token < nearest, g, 0.0))
            else:
                g = left(gl.where(token > other if READS else token < other, g, 0.0))
            for block in range(BLOCKS):
                j = i * BLOCKS + block
                slot, phase = j % SLOTS, j // SLOTS & 1
                vector, partner = (qb.index(slot), kb.index(slot)) if READS else (kb.index(slot), qb.index(slot))
                hat, met = hats.index(mine), hats.index(theirs)
                state = sb.index(slot) if READS else dsb.index(slot)
                channel = gl.arange(0, BLOCK, of_channels)

                mbarrier.wait(decay_full.index(slot), phase)
                x = nothing
                if LOW:
                    x = warpgroup_mma(pick, low.index(slot), x, use_acc=False, is_async=True)
                    x = warpgroup_mma(pick, high.index(slot), x, is_async=True)
                else:
                    x = warpgroup_mma(pick, high.index(slot), x, use_acc=False, is_async=True)
                mbarrier.wait(state_full.index(slot), phase)
                d = warpgroup_mma(cotangent, state.permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(pair_full.index(slot), phase)
                x = warpgroup_mma_wait(1, deps=[x])
                x = x * LOG2E - factors.index(3 * slot).load(of_channels)[None, :]
                e = exp2(x if READS else -x)
                tma.store_wait(0)  # a gradient takes the place of what it is the gradient of
                hat.store((vector.load(WIDE).to(gl.float32) * e).to(gl.bfloat16))
                fence_async_shared()
                mbarrier.arrive(scaled.index(mine), count=1)
                factor = factors.index(3 * slot + 1 + mine).load(of_channels)[None, :]
                d = warpgroup_mma_wait(0, deps=[d])
                mbarrier.arrive(state_empty.index(slot), count=1)
                mbarrier.arrive(empty.index(stage), count=1, pred=block == BLOCKS - 1)
                d = d * (factor * scale if READS else factor)
                mbarrier.wait(scaled.index(theirs), j & 1)
                if READS:
                    d = warpgroup_mma(g, met, d, is_async=True)
                    mbarrier.wait(sum_empty.index(0), (j & 1) ^ 1)
                    d = warpgroup_mma_wait(0, deps=[d])
                    split(hat.load(WIDE).to(gl.float32) * d, results.index(0), results.index(1))
                else:
                    split(hat.load(WIDE).to(gl.float32) * d, high.index(slot), low.index(slot))  # where decays were
                    part = warpgroup_mma(g, met, nothing, use_acc=False, is_async=True)
                    mbarrier.wait(sum_empty.index(0), (j & 1) ^ 1)
                    part = warpgroup_mma_wait(0, deps=[part])
                    split(-hat.load(WIDE).to(gl.float32) * part, results.index(2), results.index(3))
                    d += part
                fence_async_shared()
                mbarrier.arrive(sum_full.index(0), count=1)
                if BEFORE:
                    d = warpgroup_mma(near, met, d, is_async=True)
                    d = warpgroup_mma_wait(0, deps=[d])
                mbarrier.arrive(used.index(theirs), count=1)
                other_vectors = partner.load(WIDE).to(gl.float32)
                if BEFORE:
                    u = gl.load(bonus + head // SPLIT * K + block * BLOCK + channel).to(gl.float32)[None, :]
                    if READS:
                        of_bonus = gl.sum(own * vector.load(WIDE).to(gl.float32) * other_vectors, 0)
                        gl.store(dbonus + place * K + block * BLOCK + channel, of_bonus)
                    other_vectors = other_vectors * u
                give_back(pair_empty.index(slot))
                d = d * e + own * other_vectors
                mbarrier.wait(used.index(mine), j & 1)
                hat.store(d.to(gl.bfloat16))
                fence_async_shared()
                at = [head, first + rows, C - rows, block * BLOCK]
                tma.store(dqd if READS else dkd, at, hat.reshape((1, 1, C, BLOCK)))
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
        ragged(v, length, v_token, heads, v_head, C, V),
        ragged(do, length, do_token, heads, do_head, C, V),
        of_states(states, places, K, V, SPLIT, BLOCK, square),
        of_states(dstates, places, K, V, SPLIT, BLOCK, square),
        strips(dq, length, heads * K, heads, K, C, K),
        strips(dk, length, heads * K, heads, K, C, K),
    )
    buffers = (
        buffer(SLOTS, C, BLOCK), buffer(SLOTS, C, BLOCK), buffer(STAGES, C, V), buffer(STAGES, C, V),
        buffer(SLOTS, BLOCK, V), buffer(SLOTS, BLOCK, V), buffer(SLOTS, C, BLOCK), buffer(SLOTS, C, BLOCK),
        numbers(3 * SLOTS, BLOCK, gl.float32), buffer(2, C, BLOCK), buffer(4, C, BLOCK),
    )  # fmt: skip
    bars = (
        barriers(STAGES, 1), barriers(STAGES, 2),  # values and cotangents: full, empty
        barriers(SLOTS, 1), barriers(SLOTS, 2),  # queries and keys
        barriers(SLOTS, 1), barriers(SLOTS, 3),  # states
        barriers(SLOTS, 1),  # decays
        barriers(2, 1), barriers(2, 1),  # scaled queries, keys: made, used
        barriers(1, 2), barriers(1, 1),  # the decay's gradient
    )  # fmt: skip
    fence_async_shared()
    decays = (decay, decay_token, decay_head, SPLIT)
    gl.warp_specialize([
        (side, (True, bars, sources, buffers, bonus, dbonus, work, group, scale, C, K, SPLIT, BEFORE, PACKED, LOW, STAGES)),
        (side, (False, bars, sources, buffers, bonus, dbonus, work, group, scale, C, K, SPLIT, BEFORE, PACKED, LOW, STAGES)),
        (add_up, (bars, buffers, decays, ddecay, settled, work, group, C, K, V, BEFORE, PACKED, DDECAY, LOW)),
        (load, (bars, sources, buffers, work, group, C, K, V, SPLIT, PACKED, STAGES)),
    ], [4, 4, 1], [REGISTERS, SUMS, FEW])  # fmt: skip


def fits(family: Family, chunk: int, q: Tensor, k: Tensor, v: Tensor, do: Tensor, decay: Tensor) -> bool:
    """Whether this kernel can do its part of ``gradients.gradients``. A decay's strides may be 0."""
    known = family.half and family.rule == PLAIN and family.decay == CHANNEL and chunk == hopper.CHUNK
    even = decay.data_ptr() % 16 == 0 and decay.stride(1) % 4 == decay.stride(2) % 4 == 0 and decay.stride(3) == 1
    held = decay.dtype in (torch.bfloat16, torch.float32)
    return known and even and held and hopper.fits((k.shape[3], v.shape[3]), q, k, v, do)


def options(size_v: int) -> dict[str, int]:
    """What the pipeline and the registers of a program are. No more than one program fits a multiprocessor."""
    rest = 116 * 1024 + 512 * size_v  # bytes: everything but values and cotangents
    stages = min(2, (SHARED - rest) // (256 * size_v))
    return dict(STAGES=stages, num_warps=4, REGISTERS=176, SUMS=128, FEW=40, maxnreg=128)
