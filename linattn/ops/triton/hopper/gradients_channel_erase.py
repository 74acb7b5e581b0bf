"""``gradients`` with a decay per channel and the erase rule for Hopper, in Gluon: chunks that settle. Persistent programs.

Two kinds of queries, q and those that read before their token's decay, r, meet two kinds of keys, k and w. All are scaled to the middle
of the chunk, Q̂ = Q ∘ e, R̂ = R ∘ f, K̂ = K / e, Ŵ = W / e, and know no decay of each other. With U what the erasing writes, X the
cotangents of what is read, G = dO Vᵀ, G' = dO Uᵀ, N = X Vᵀ and N' = X Uᵀ, all four strictly below the diagonal:

    dQ = e ∘ D + own ∘ K + own' ∘ W,   D = fade dO Sᵀ + G K̂ + G' Ŵ        dR = f ∘ E,   E = fade X Sᵀ + N K̂ + N' Ŵ
    dK = (end V dSᵀ + P) / e + own ∘ Q,   P = Gᵀ Q̂ + Nᵀ R̂                 dW = (end U dSᵀ + P') / e + own' ∘ Q,   P' = G'ᵀ Q̂ + N'ᵀ R̂

The decay's gradient adds up, over tokens on one side or the other, Q̂ ∘ D, R̂ ∘ E, -K̂ ∘ P - Ŵ ∘ P' and what is sent; pairs on one side of
a token cancel, as both ends are rounded alike. What r has of the token right before it has no decay within: it comes in after that.

One warp loads ahead. All others do the same, for 64 channels at a time: few tiles are in registers, and what the next 64 channels or the
next chunk need comes to shared memory meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton import hopper
from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import chunk, fetch, of_states, ragged, state_at
from linattn.ops.triton.hopper.common import barriers, buffer, numbers
from linattn.ops.triton.hopper.gradients_channel import seek, split, strips
from linattn.ops.triton.hopper.names import barrier, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import again, held, hold, pick, pinned, scaled
from linattn.ops.triton.hopper.prepare_channel import BLOCK, NATURAL_RESET, add_two, exp2, in_blocks, keep
from linattn.ops.triton.plan import CHANNEL, ERASE, Family
from linattn.ops.triton.tiles import LOG2E, TAME


@gluon.constexpr_function
def wide(warps):
    """[C, BLOCK] and [C, C] in accumulators, a part of the columns for each warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 256 // warps, 16])


@gluon.constexpr_function
def whole(warps):
    """[C, C] as left operands have it: all of it in each warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, warps // 4], [16, 64, 16])


@gluon.jit
def load(full, empty, sources, tiles, work, group, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SPLIT: gl.constexpr,
         PACKED: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Bring tile after tile, ahead of use as far as there is room, in the order in which room comes free."""
    values, states, vectors = tiles
    places, cu, sequences, tokens, heads = work
    i = 0
    for place in range(gl.program_id(0), places, gl.num_programs(0)):
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        if rows > 0:
            for block in range(K // BLOCK):
                j = i * (K // BLOCK) + block
                here = full.index(1)
                mbarrier.wait(empty.index(1), (j & 1) ^ 1)
                mbarrier.expect(here, 4 * BLOCK * V)
                of_state = state_at(place, block * BLOCK, K, V, SPLIT)
                for part in gl.static_range(2):
                    tma.load(sources[4 + part], of_state, here, states[part].index(0))
                if block == 0:
                    here = full.index(0)
                    mbarrier.wait(empty.index(0), (i & 1) ^ 1)
                    mbarrier.expect(here, 8 * C * V)
                    for part in gl.static_range(4):
                        fetch(sources[part], head, first, rows, here, values[part].index(0), C, V)
                slot = j % STAGES
                here = full.index(2 + slot)
                mbarrier.wait(empty.index(2 + slot), (j // STAGES & 1) ^ 1)
                mbarrier.expect(here, 8 * C * BLOCK)
                for part in gl.static_range(4):
                    to = vectors[part].index(slot).reshape((1, 1, C, BLOCK))
                    of = head // (group if part < 2 else SPLIT)
                    tma.load(sources[6 + part], [of, first + rows, C - rows, block * BLOCK], here, to)
            i += 1


@gluon.jit
def halves(decays, place, at, block, work, C: gl.constexpr):
    """The decays [C / 2, BLOCK] of both halves of a chunk's block, as they lie; 0 past the end. A warp has all tokens of a channel."""
    decay, decay_token, decay_head, split_in = decays
    head, first, rows = at
    HALF: gl.constexpr = C // 2
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [WARPS, 32 // WARPS], [1, WARPS], [1, 0])
    rows = gl.where(place < work[0], rows, 0)
    stride = decay_token // 4 * 4
    row = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    channel = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    start = decay + first.to(gl.int64) * stride + (head // split_in).to(gl.int64) * (decay_head // 4 * 4)
    where = start + row[:, None] * stride + channel[None, :]
    early = gl.load(where, mask=(row < rows)[:, None], other=0.0)
    return early, gl.load(where + HALF * stride, mask=(row < rows - HALF)[:, None], other=0.0)


@gluon.jit
def lay_out(early, late, high, low, factors, settled, where, C: gl.constexpr):
    """Make decays ready: tiles for sums, and by channel orders up to the middle and the weight from there on."""
    early = gl.maximum(early.to(gl.float32), NATURAL_RESET)
    late = gl.maximum(late.to(gl.float32), NATURAL_RESET)
    tiles = (high, low)
    keep(early, tiles, 0, C // 2)
    keep(late, tiles, C // 2, C // 2)
    of_early, of_late = gl.reduce((early, late), 0, add_two)
    to_middle = of_early * LOG2E
    to_end = of_late * LOG2E
    factors.index(0).store(to_middle)
    factors.index(1).store(exp2(to_end))
    nearest = gl.min(gl.minimum(to_middle, to_end), 0)
    gl.store(settled + where, (nearest >= -TAME).to(gl.int32))


@gluon.jit
def passing(states, factors, V: gl.constexpr):
    """What passes through the whole chunk by channel, but for the decay."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [BLOCK // WARPS, WARPS // 2], [WARPS, 1], [1, 0])
    dstate, state = in_blocks(states[0].index(0), BLOCK, V), in_blocks(states[1].index(0), BLOCK, V)
    both = gl.zeros([BLOCK, BLOCK], gl.float32, layout)
    for part in gl.static_range(V // BLOCK):
        both += dstate.index(part).load(layout).to(gl.float32) * state.index(part).load(layout).to(gl.float32)
    factors.index(2).store(gl.sum(both, 1))


@gluon.jit
def send_off(to, tile, at, block, C: gl.constexpr):
    head, first, rows = at
    tma.store(to, [head, first + rows, C - rows, block * BLOCK], tile.reshape((1, 1, C, BLOCK)))


@gluon.jit
def make(full, empty, results, tiles, kept, decays, ddecay, settled, work, group, scale, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
         PACKED: gl.constexpr, DDECAY: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """All gradients, 64 channels after 64 channels."""
    to_dq, to_dk, to_dr, to_dw = results
    values, states, vectors = tiles
    met, sums, factors, weights = kept
    places, cu, sequences, tokens, heads = work
    BLOCKS: gl.constexpr = K // BLOCK
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = wide(WARPS)
    WHOLE: gl.constexpr = whole(WARPS)
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    of_tokens: gl.constexpr = gl.SliceLayout(1, WIDE)
    nothing = gl.zeros([C, BLOCK], gl.float32, WIDE)
    nought = heads % group  # but no compiler knows, nor keeps in registers where tiles lie

    place = seek(gl.program_id(0), work, C, PACKED)
    at = chunk(place, cu, sequences, tokens, heads, C, PACKED)
    early, late = halves(decays, place, at, 0, work, C)
    i = 0
    while place < places:
        next_place = seek(place + gl.num_programs(0), work, C, PACKED)
        next_at = chunk(next_place, cu, sequences, tokens, heads, C, PACKED)
        head, first, rows = at

        # What queries and keys have of each other.
        still = i * nought
        of_v, of_u, of_do, of_x = values
        v_tile, u_tile, do_tile, x_tile = of_v.index(still), of_u.index(still), of_do.index(still), of_x.index(still)
        token = (gl.arange(0, C, of_tokens) + still)[:, None]
        other = gl.arange(0, C, of_channels)[None, :]
        mbarrier.wait(full.index(0), i & 1)
        g = warpgroup_mma(do_tile, v_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        g_w = warpgroup_mma(do_tile, u_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        n = warpgroup_mma(x_tile, v_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        n_w = warpgroup_mma(x_tile, u_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        g, g_w, n, n_w = warpgroup_mma_wait(0, deps=[g, g_w, n, n_w])
        g = g * scale
        g_w = g_w * scale
        hold(met[0].index(0), gl.where(token > other, g, 0.0))
        hold(met[1].index(0), gl.where(token > other, g_w, 0.0))
        hold(met[2].index(0), gl.where(token > other + 1, n, 0.0))
        hold(met[3].index(0), gl.where(token > other + 1, n_w, 0.0))
        hold(met[4].index(0), gl.where(token == other + 1, n, 0.0))
        hold(met[5].index(0), gl.where(token == other + 1, n_w, 0.0))
        weights.index(0).store(gl.sum(gl.where(token == other, g, 0.0), 1))
        weights.index(1).store(gl.sum(gl.where(token == other, g_w, 0.0), 1))

        for block in range(BLOCKS):
            j = i * BLOCKS + block
            still = j * nought
            slot = j % STAGES
            v_tile, u_tile, do_tile, x_tile = of_v.index(still), of_u.index(still), of_do.index(still), of_x.index(still)
            dstate, state = states[0].index(still).permute((1, 0)), states[1].index(still).permute((1, 0))
            q_hat, k_hat, r_hat, w_hat = vectors[0].index(slot), vectors[1].index(slot), vectors[2].index(slot), vectors[3].index(slot)
            g_tile, g_w_tile, n_tile, n_w_tile = met[0].index(still), met[1].index(still), met[2].index(still), met[3].index(still)
            near, near_w, high, low = met[4].index(still), met[5].index(still), sums[0].index(still), sums[1].index(still)
            sum_high, sum_low, far_high, far_low = sums[2].index(still), sums[3].index(still), sums[4].index(still), sums[5].index(still)
            ahead, ahead_at, next_block = place, at, block + 1
            if block == BLOCKS - 1:
                ahead, ahead_at, next_block = next_place, next_at, 0
            row = (gl.arange(0, C, gl.SliceLayout(1, WHOLE)) + still)[:, None]
            column = gl.arange(0, C, gl.SliceLayout(0, WHOLE))[None, :]

            # Keys' part of the state's cotangent, and queries' of the state.
            mbarrier.wait(full.index(1), j & 1)
            ck = warpgroup_mma(v_tile, dstate, nothing, use_acc=False, is_async=True)
            cw = warpgroup_mma(u_tile, dstate, nothing, use_acc=False, is_async=True)
            cq = warpgroup_mma(do_tile, state, nothing, use_acc=False, is_async=True)
            cr = warpgroup_mma(x_tile, state, nothing, use_acc=False, is_async=True)
            lay_out(early, late, high, low, factors, settled, place * BLOCKS + block, C)
            if DDECAY:
                passing(states, factors, V)
            ck, cw, cq, cr = warpgroup_mma_wait(0, deps=[ck, cw, cq, cr])
            fence_async_shared()
            barrier()  # the states are used up, and decays are there
            mbarrier.arrive(empty.index(1), count=1)
            if block == BLOCKS - 1:
                mbarrier.arrive(empty.index(0), count=1)

            # Orders between the middle and after each token (e), or before it (f).
            up_to = pick(column <= row, WIDE)
            orders = warpgroup_mma(up_to, low, nothing, use_acc=False, is_async=True)
            orders = warpgroup_mma(up_to, high, orders, is_async=True)
            own_steps = high.load(WIDE).to(gl.float32) + low.load(WIDE).to(gl.float32)
            to_middle = factors.index(0).load(of_channels)[None, :]
            to_end = factors.index(1).load(of_channels)[None, :]
            orders = warpgroup_mma_wait(0, deps=[orders]) * LOG2E - to_middle
            f = exp2(orders - own_steps * LOG2E)
            mbarrier.wait(full.index(2 + slot), j // STAGES & 1)
            of_q, of_k, of_r, of_w = q_hat.load(WIDE), k_hat.load(WIDE), r_hat.load(WIDE), w_hat.load(WIDE)
            barrier()  # all of it is in registers, and decays are used up
            scaled(q_hat, of_q, exp2(orders))
            scaled(r_hat, of_r, f)
            back = exp2(-orders)
            of_k, of_w = scaled(k_hat, of_k, back), scaled(w_hat, of_w, back)

            # What passes the ends of the chunk; what queries and keys have of each other.
            fade = exp2(to_middle)
            ck = ck * to_end
            cw = cw * to_end
            cq = cq * (fade * scale)
            cr = cr * fade
            if DDECAY:
                across_it = of_k.to(gl.float32) * ck + of_w.to(gl.float32) * cw
                split(across_it, high, low)
            fence_async_shared()
            barrier()
            ck = warpgroup_mma(g_tile.permute((1, 0)), q_hat, ck, is_async=True)
            cw = warpgroup_mma(g_w_tile.permute((1, 0)), q_hat, cw, is_async=True)
            cq = warpgroup_mma(g_tile, k_hat, cq, is_async=True)
            cr = warpgroup_mma(n_tile, k_hat, cr, is_async=True)
            ck = warpgroup_mma(n_tile.permute((1, 0)), r_hat, ck, is_async=True)
            cw = warpgroup_mma(n_w_tile.permute((1, 0)), r_hat, cw, is_async=True)
            cq = warpgroup_mma(g_w_tile, w_hat, cq, is_async=True)
            cr = warpgroup_mma(n_w_tile, w_hat, cr, is_async=True)
            ck, cw, cq, cr = warpgroup_mma_wait(0, deps=[ck, cw, cq, cr])
            if DDECAY:
                across_it = pinned(across_it - held(k_hat, WIDE) * ck - held(w_hat, WIDE) * cw + held(q_hat, WIDE) * cq)
                split(held(r_hat, WIDE) * cr, far_high, far_low)
            ck = warpgroup_mma(near.permute((1, 0)), r_hat, ck, is_async=True)
            cw = warpgroup_mma(near_w.permute((1, 0)), r_hat, cw, is_async=True)
            cr = warpgroup_mma(near, k_hat, cr, is_async=True)
            cr = warpgroup_mma(near_w, w_hat, cr, is_async=True)
            if DDECAY:
                split(across_it, sum_high, sum_low)
            own = weights.index(0).load(of_tokens)[:, None]
            own_w = weights.index(1).load(of_tokens)[:, None]
            dq_out = ((cq + own * held(k_hat, WIDE) + own_w * held(w_hat, WIDE)) * again(orders)).to(gl.bfloat16)
            ck, cw, cr = warpgroup_mma_wait(0, deps=[ck, cw, cr])
            of_q = held(q_hat, WIDE)
            barrier()  # gradients take the place of what they are the gradients of
            back = again(-orders)
            hold(k_hat, (ck + own * of_q) * back)
            hold(w_hat, (cw + own_w * of_q) * back)
            q_hat.store(dq_out)
            hold(r_hat, cr * f)
            fence_async_shared()
            barrier()
            send_off(to_dq, q_hat, at, block, C)
            send_off(to_dk, k_hat, at, block, C)
            send_off(to_dr, r_hat, at, block, C)
            send_off(to_dw, w_hat, at, block, C)

            early, late = halves(decays, ahead, ahead_at, next_block, work, C)

            # The decay's gradient: of what is read across a token, of what is sent past it, and of what passes the chunk.
            if DDECAY:
                earlier, here_on, later = pick(column < row, WIDE), pick(column >= row, WIDE), pick(column > row, WIDE)
                dd = warpgroup_mma(earlier, low, nothing, use_acc=False, is_async=True)
                dd = warpgroup_mma(earlier, high, dd, is_async=True)
                dd = warpgroup_mma(here_on, sum_low, dd, is_async=True)
                dd = warpgroup_mma(here_on, sum_high, dd, is_async=True)
                dd = warpgroup_mma(later, far_low, dd, is_async=True)
                dd = warpgroup_mma(later, far_high, dd, is_async=True)
                past = factors.index(2).load(of_channels) * exp2(factors.index(0).load(of_channels)) * factors.index(1).load(of_channels)
                time = (gl.arange(0, C, of_tokens) + still)[:, None]
                channel = block * BLOCK + gl.arange(0, BLOCK, of_channels)[None, :]
                to = ddecay + ((first.to(gl.int64) + time) * heads + head) * K + channel
                dd = warpgroup_mma_wait(0, deps=[dd]) + past[None, :]
                gl.store(to, dd.to(ddecay.dtype.element_ty), mask=time < rows)
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(empty.index(2 + slot), count=1)
        place = next_place
        at = next_at
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
    SPLIT: gl.constexpr, DDECAY: gl.constexpr, STAGES: gl.constexpr,
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
    of_state: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, V], gl.bfloat16)
    sources = (
        ragged(v, length, v_token, heads, v_head, C, V),
        ragged(values, length, heads * V, heads, V, C, V),
        ragged(do, length, do_token, heads, do_head, C, V),
        ragged(de, length, heads * V, heads, V, C, V),
        of_states(dstates, places, K, V, SPLIT, BLOCK, of_state),
        of_states(states, places, K, V, SPLIT, BLOCK, of_state),
        strips(q, length, q_token, key_heads, q_head, C, K),
        strips(k, length, k_token, key_heads, k_head, C, K),
        strips(read, length, read_token, heads // SPLIT, read_head, C, K),
        strips(write, length, write_token, heads // SPLIT, write_head, C, K),
    )
    results = (
        strips(dq, length, heads * K, heads, K, C, K),
        strips(dk, length, heads * K, heads, K, C, K),
        strips(dread, length, heads * K, heads, K, C, K),
        strips(dwrite, length, heads * K, heads, K, C, K),
    )
    decays = (decay, decay_token, decay_head, SPLIT)

    tiles = (
        (buffer(1, C, V), buffer(1, C, V), buffer(1, C, V), buffer(1, C, V)),  # v, u, do, x
        (buffer(1, BLOCK, V), buffer(1, BLOCK, V)),  # the state's cotangent, the state
        (buffer(STAGES, C, BLOCK), buffer(STAGES, C, BLOCK), buffer(STAGES, C, BLOCK), buffer(STAGES, C, BLOCK)),  # q, k, r, w
    )
    # G, G', N, N', and what the latter two have of neighbours; decays, then what is sent, and what crosses from on, or after, each token.
    met = (buffer(1, C, C), buffer(1, C, C), buffer(1, C, C), buffer(1, C, C), buffer(1, C, C), buffer(1, C, C))
    sums = (buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK))
    factors = numbers(3, BLOCK, gl.float32)  # orders up to the middle, the weight from there on; what passes
    weights = numbers(2, C, gl.float32)  # own: of k, of w
    full, empty = barriers(2 + STAGES, 1), barriers(2 + STAGES, 1)  # v, u, do, x; states; q, k, r, w
    fence_async_shared()
    kept = (met, sums, factors, weights)
    gl.warp_specialize([
        (make, (full, empty, results, tiles, kept, decays, ddecay, settled, work, group, scale, C, K, V, PACKED, DDECAY, STAGES)),
        (load, (full, empty, sources, tiles, work, group, C, K, V, SPLIT, PACKED, STAGES)),
    ], [1], [24])  # fmt: skip


def fits(
    family: Family, chunk: int, q: Tensor, k: Tensor, v: Tensor, read: Tensor | None, write: Tensor | None, do: Tensor, decay: Tensor
) -> bool:
    """Whether this kernel can do its part of ``gradients.gradients``. A decay's strides may be 0."""
    known = family.half and family.rule == ERASE and family.decay == CHANNEL and not family.before and chunk == hopper.CHUNK
    even = decay.data_ptr() % 16 == 0 and decay.stride(1) % 4 == decay.stride(2) % 4 == 0 and decay.stride(3) == 1
    held = decay.dtype in (torch.bfloat16, torch.float32)
    return known and even and held and hopper.fits((k.shape[3], v.shape[3]), q, k, v, read, write, do)


def options(size_k: int, size_v: int) -> dict[str, int]:
    """How many blocks of channels are at hand, and the registers that a thread can have. No more than one program fits a multiprocessor."""
    return dict(programs=1, STAGES=128 // size_v, num_warps=8, maxnreg=168)
