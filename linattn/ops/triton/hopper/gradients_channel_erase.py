"""``gradients`` with a decay per channel and the erase rule for Hopper, in Gluon: chunks that settle. Persistent programs.

Two kinds of queries, q and those that read before their token's decay, r, meet two kinds of keys, k and w. All are scaled to the middle
of the chunk, Q̂ = Q ∘ e, R̂ = R ∘ f, K̂ = K / e, Ŵ = W / e, and know no decay of each other. With U what the erasing writes, X the
cotangents of what is read, G = dO Vᵀ, G' = dO Uᵀ, N = X Vᵀ and N' = X Uᵀ, all four strictly below the diagonal:

    dQ = e ∘ D + own ∘ K + own' ∘ W,   D = fade dO Sᵀ + G K̂ + G' Ŵ        dR = f ∘ E,   E = fade X Sᵀ + N K̂ + N' Ŵ
    dK = (end V dSᵀ + P) / e + own ∘ Q,   P = Gᵀ Q̂ + Nᵀ R̂                 dW = (end U dSᵀ + P') / e + own' ∘ Q,   P' = G'ᵀ Q̂ + N'ᵀ R̂

The decay's gradient adds up, over tokens on one side or the other, Q̂ ∘ D, R̂ ∘ E, -K̂ ∘ P - Ŵ ∘ P' and what is sent; pairs on one side of
a token cancel, as both ends are rounded alike. What r has of the token right before it has no decay within: it comes in after that.

All warps do the same: a chunk's tiles lie in shared memory, and what is made of them takes their place as they are used up. Where values
are long a part of the next chunk's comes meanwhile; where they are short two programs share a multiprocessor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from linattn.ops.triton import hopper
from linattn.ops.triton.hopper.common import barriers, buffer, numbers
from linattn.ops.triton.hopper.gradients import chunk, fetch, ragged
from linattn.ops.triton.hopper.gradients_channel import seek, split
from linattn.ops.triton.hopper.prepare_channel import BLOCK, NATURAL_RESET, add_two, exp2, keep
from linattn.ops.triton.plan import CHANNEL, ERASE, Family
from linattn.ops.triton.tiles import LOG2E, TAME


@gluon.constexpr_function
def wide(K):
    """[C, K] in accumulators, a warpgroup for 64 channels; [C, C] the same in each."""
    return gl.NVMMADistributedLayout([3, 0], [4, K // 64], [16, 64, 16])


@gluon.constexpr_function
def square(K):
    """[C, C] in accumulators, shared by all warpgroups."""
    return gl.NVMMADistributedLayout([3, 0], [4, K // 64], [16, 4096 // K, 16])


@gluon.jit
def tiles_of(tile, n: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """The same memory as ``n`` tiles [HEIGHT, WIDTH]: the swizzle lays out 64 numbers after 64 numbers of all rows."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], gl.bfloat16)
    return tile._reinterpret(gl.bfloat16, [n, HEIGHT, WIDTH], layout)


@gluon.jit
def bring(GROUP: gl.constexpr, full, sources, buffers, place, work, group, C: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
          PACKED: gl.constexpr):  # fmt: skip
    """Begin to load a group of a chunk's tiles: what keys are read with and their values; what queries read and cotangents; vectors."""
    places, cu, sequences, tokens, heads = work
    states, values, vectors = buffers
    of_dstates, of_v, of_u, of_states, of_do, of_x, of_q, of_k, of_r, of_w = sources
    if place < places:
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        here = full.index(GROUP)
        if GROUP == 2:
            mbarrier.expect(here, 8 * C * K)
            fetch(of_q, head // group, first, rows, here, vectors.index(0), C, K)
            fetch(of_k, head // group, first, rows, here, vectors.index(1), C, K)
            fetch(of_r, head, first, rows, here, vectors.index(2), C, K)
            fetch(of_w, head, first, rows, here, vectors.index(3), C, K)
        else:
            mbarrier.expect(here, 2 * K * V + 4 * C * V)
            tma.async_copy_global_to_shared(of_dstates if GROUP == 0 else of_states, [place * K, 0], here, states.index(GROUP))
            fetch(of_v if GROUP == 0 else of_do, head, first, rows, here, values.index(2 * GROUP), C, V)
            fetch(of_u if GROUP == 0 else of_x, head, first, rows, here, values.index(2 * GROUP + 1), C, V)


@gluon.jit
def halves(decays, head, first, rows, C: gl.constexpr, K: gl.constexpr):
    """The decays [C / 2, K] of both halves of a chunk, as they lie; 0 past the end. A warp has all tokens of a channel."""
    decay, decay_token, decay_head = decays
    HALF: gl.constexpr = C // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, K // 16], [1, 0])
    stride = decay_token // 4 * 4
    row = gl.arange(0, HALF, gl.SliceLayout(1, layout))
    channel = gl.arange(0, K, gl.SliceLayout(0, layout))
    where = decay + first.to(gl.int64) * stride + head.to(gl.int64) * (decay_head // 4 * 4) + row[:, None] * stride + channel[None, :]
    early = gl.load(where, mask=(row < rows)[:, None], other=0.0)
    late = gl.load(where + HALF * stride, mask=(row < rows - HALF)[:, None], other=0.0)
    return gl.maximum(early.to(gl.float32), NATURAL_RESET), gl.maximum(late.to(gl.float32), NATURAL_RESET)


@gluon.jit
def lay_out(early, late, high, low, factors, settled, place, C: gl.constexpr, K: gl.constexpr):
    """Make decays ready: tiles for sums, and by channel orders up to the middle and the weight from there on."""
    tiles = (high, low)
    keep(early, tiles, 0, C // 2)
    keep(late, tiles, C // 2, C // 2)
    of_early, of_late = gl.reduce((early, late), 0, add_two)
    to_middle = of_early * LOG2E
    to_end = of_late * LOG2E
    factors.index(0).store(to_middle)
    factors.index(1).store(exp2(to_end))
    channel = gl.arange(0, K, to_middle.type.layout)
    for block in gl.static_range(K // BLOCK):
        nearest = gl.min(gl.where(channel // BLOCK == block, gl.minimum(to_middle, to_end), 0.0), 0)
        gl.store(settled + place * (K // BLOCK) + block, (nearest >= -TAME).to(gl.int32))


@gluon.jit
def passing(states, factors, K: gl.constexpr, V: gl.constexpr):
    """What passes through the whole chunk by channel, but for the decay."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [K // 16, 1], [0, 1])
    blocks = tiles_of(states, 2 * V // BLOCK, K, BLOCK)
    both = gl.zeros([K, BLOCK], gl.float32, layout)
    for part in gl.static_range(V // BLOCK):
        both += blocks.index(part).load(layout).to(gl.float32) * blocks.index(V // BLOCK + part).load(layout).to(gl.float32)
    factors.index(2).store(gl.sum(both, 1))


@gluon.jit
def pick(chosen, layout: gl.constexpr):
    """A 0/1 matrix as a left operand, in registers: see prepare_channel.left."""
    x = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.where(chosen, 1.0, 0.0).to(gl.bfloat16)], gl.bfloat16, False, 2)
    return gl.convert_layout(x, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def hold(tile, x):
    tile.store(x.to(gl.bfloat16))


@gluon.jit
def held(tile, layout: gl.constexpr):
    return tile.load(layout).to(gl.float32)


@gluon.jit
def send_off(to, tile, head, first, rows, C: gl.constexpr, K: gl.constexpr):
    tma.async_copy_shared_to_global(to, [head, first + rows, C - rows, 0], tile.reshape((1, 1, C, K)))


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
    DDECAY: gl.constexpr,
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
    of_state: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, V], gl.bfloat16)
    sources = (
        tma.make_tensor_descriptor(dstates, [places * K, V], [V, 1], [K, V], of_state),
        ragged(v, length, v_token, heads, v_head, C, V),
        ragged(values, length, heads * V, heads, V, C, V),
        tma.make_tensor_descriptor(states, [places * K, V], [V, 1], [K, V], of_state),
        ragged(do, length, do_token, heads, do_head, C, V),
        ragged(de, length, heads * V, heads, V, C, V),
        ragged(q, length, q_token, key_heads, q_head, C, K),
        ragged(k, length, k_token, key_heads, k_head, C, K),
        ragged(read, length, read_token, heads, read_head, C, K),
        ragged(write, length, write_token, heads, write_head, C, K),
    )
    to_dq = ragged(dq, length, heads * K, heads, K, C, K)
    to_dk = ragged(dk, length, heads * K, heads, K, C, K)
    to_dr = ragged(dread, length, heads * K, heads, K, C, K)
    to_dw = ragged(dwrite, length, heads * K, heads, K, C, K)

    # The states' cotangents and states; v, u, do, x; q, k, r, w. In the place of the former: products of cotangents and values, for
    # which queries keep the states where values are long; decays, then neighbours; in the end what the decay's gradient adds up.
    LONG: gl.constexpr = V == 2 * BLOCK
    both_states, all_values, vectors = buffer(2, K, V), buffer(4, C, V), buffer(4, C, K)
    buffers = (both_states, all_values, vectors)
    in_states = tiles_of(both_states, 2 * K * V // (C * C), C, C)
    in_values = tiles_of(all_values, 4 * V // C, C, C)
    results = tiles_of(both_states, 2 * V // C, C, K)
    decays_in = tiles_of(all_values, 4 * V // K, C, K)
    sending = buffer(2, C, K)
    factors = numbers(3, K, gl.float32)  # orders up to the middle, the weight from there on; what passes
    weights = numbers(2, C, gl.float32)  # own: of k, of w
    neighbours = numbers(2, C, gl.bfloat16)  # of the token before: of its k, of its w
    full = barriers(3, 1)
    fence_async_shared()
    gl.thread_barrier()

    WIDE: gl.constexpr = wide(K)
    SQUARE: gl.constexpr = square(K)
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    of_tokens: gl.constexpr = gl.SliceLayout(1, WIDE)
    nothing = gl.zeros([C, K], gl.float32, WIDE)
    blank = gl.zeros([C, C], gl.float32, SQUARE)
    nought = heads % group  # but no compiler knows, nor keeps in registers where tiles lie

    place = seek(gl.program_id(0), work, C, PACKED)
    for part in gl.static_range(3):
        bring(part, full, sources, buffers, place, work, group, C, K, V, PACKED)
    i = 0
    while place < places:
        head, first, rows = chunk(place, cu, sequences, tokens, heads, C, PACKED)
        next_place = seek(place + gl.num_programs(0), work, C, PACKED)
        still = i * nought
        q_hat, k_hat, r_hat, w_hat = vectors.index(still), vectors.index(still + 1), vectors.index(still + 2), vectors.index(still + 3)
        v_tile, u_tile, do_tile = all_values.index(still), all_values.index(still + 1), all_values.index(still + 2)
        x_tile = all_values.index(still + 3)
        dstate, state = both_states.index(still).permute((1, 0)), both_states.index(still + 1).permute((1, 0))
        g_tile, g_w_tile = in_states.index(still), in_states.index(still + 1)
        if K == 2 * BLOCK:
            n_tile, n_w_tile = in_states.index(still + 2), in_states.index(still + 3)
        else:
            n_tile, n_w_tile = in_values.index(still + 2), in_values.index(still + 3)
        near, near_w = in_values.index(still), in_values.index(still + 1)
        high, low = decays_in.index(still), decays_in.index(still + 1)
        sent, sent_low = sending.index(still), sending.index(still + 1)
        result, result_low = results.index(still), results.index(still + 1)
        row = (gl.arange(0, C, of_tokens) + still)[:, None]
        column = gl.arange(0, C, of_channels)[None, :]
        token = (gl.arange(0, C, gl.SliceLayout(1, SQUARE)) + still)[:, None]
        other = gl.arange(0, C, gl.SliceLayout(0, SQUARE))[None, :]

        # Keys' part of the state's cotangent, and queries' of the state.
        mbarrier.wait(full.index(0), i & 1)
        mbarrier.wait(full.index(1), i & 1)
        ck = warpgroup_mma(v_tile, dstate, nothing, use_acc=False, is_async=True)
        cw = warpgroup_mma(u_tile, dstate, nothing, use_acc=False, is_async=True)
        if not LONG:
            cq = warpgroup_mma(do_tile, state, nothing, use_acc=False, is_async=True)
            cr = warpgroup_mma(x_tile, state, nothing, use_acc=False, is_async=True)
        if DDECAY:
            passing(both_states, factors, K, V)
        if LONG:
            ck, cw = warpgroup_mma_wait(0, deps=[ck, cw])
        else:
            ck, cw, cq, cr = warpgroup_mma_wait(0, deps=[ck, cw, cq, cr])

        # What queries and keys have of each other.
        g = warpgroup_mma(do_tile, v_tile.permute((1, 0)), blank, use_acc=False, is_async=True)
        g_w = warpgroup_mma(do_tile, u_tile.permute((1, 0)), blank, use_acc=False, is_async=True)
        g, g_w = warpgroup_mma_wait(0, deps=[g, g_w])
        g = g * scale
        g_w = g_w * scale
        weights.index(0).store(gl.sum(gl.where(token == other, g, 0.0), 1))
        weights.index(1).store(gl.sum(gl.where(token == other, g_w, 0.0), 1))
        gl.thread_barrier()  # the states' cotangents are used up, and without long values the states
        hold(g_tile, gl.where(token > other, g, 0.0))
        hold(g_w_tile, gl.where(token > other, g_w, 0.0))
        n = warpgroup_mma(x_tile, v_tile.permute((1, 0)), blank, use_acc=False, is_async=True)
        n_w = warpgroup_mma(x_tile, u_tile.permute((1, 0)), blank, use_acc=False, is_async=True)
        n, n_w = warpgroup_mma_wait(0, deps=[n, n_w])
        early, late = halves((decay, decay_token, decay_head), head, first, rows, C, K)
        hold(neighbours.index(0), gl.sum(gl.where(token == other + 1, n, 0.0), 1))
        hold(neighbours.index(1), gl.sum(gl.where(token == other + 1, n_w, 0.0), 1))
        gl.thread_barrier()  # values are used up, and without long ones cotangents
        hold(n_tile, gl.where(token > other + 1, n, 0.0))
        hold(n_w_tile, gl.where(token > other + 1, n_w, 0.0))

        # Orders between the middle and after each token (e), or before it (f).
        lay_out(early, late, high, low, factors, settled, place, C, K)
        fence_async_shared()
        up_to = pick(column <= row, WIDE)
        orders = warpgroup_mma(up_to, low, nothing, use_acc=False, is_async=True)
        orders = warpgroup_mma(up_to, high, orders, is_async=True)
        orders = warpgroup_mma_wait(0, deps=[orders]) * LOG2E - factors.index(0).load(of_channels)[None, :]
        before = orders - (held(high, WIDE) + held(low, WIDE)) * LOG2E
        gl.thread_barrier()  # decays are used up
        near.store(gl.where(token == other + 1, neighbours.index(0).load(gl.SliceLayout(1, SQUARE))[:, None], 0.0).to(gl.bfloat16))
        near_w.store(gl.where(token == other + 1, neighbours.index(1).load(gl.SliceLayout(1, SQUARE))[:, None], 0.0).to(gl.bfloat16))

        mbarrier.wait(full.index(2), i & 1)
        hold(r_hat, held(r_hat, WIDE) * exp2(before))
        hold(q_hat, held(q_hat, WIDE) * exp2(orders))
        back = exp2(-orders)
        hold(k_hat, held(k_hat, WIDE) * back)
        hold(w_hat, held(w_hat, WIDE) * back)

        # Keys: what they send past the end, and what they have of queries.
        fading = factors.index(1).load(of_channels)[None, :]
        ck = ck * fading
        cw = cw * fading
        if DDECAY:
            met = held(k_hat, WIDE) * ck + held(w_hat, WIDE) * cw
            split(met, sent, sent_low)
        fence_async_shared()
        gl.thread_barrier()
        ck = warpgroup_mma(g_tile.permute((1, 0)), q_hat, ck, is_async=True)
        cw = warpgroup_mma(g_w_tile.permute((1, 0)), q_hat, cw, is_async=True)
        ck = warpgroup_mma(n_tile.permute((1, 0)), r_hat, ck, is_async=True)
        cw = warpgroup_mma(n_w_tile.permute((1, 0)), r_hat, cw, is_async=True)
        ck, cw = warpgroup_mma_wait(0, deps=[ck, cw])
        if DDECAY:
            met = met - held(k_hat, WIDE) * ck - held(w_hat, WIDE) * cw
        ck = warpgroup_mma(near.permute((1, 0)), r_hat, ck, is_async=True)
        cw = warpgroup_mma(near_w.permute((1, 0)), r_hat, cw, is_async=True)
        own = weights.index(0).load(of_tokens)[:, None]
        own_w = weights.index(1).load(of_tokens)[:, None]
        if LONG:
            cq = warpgroup_mma(do_tile, state, nothing, use_acc=False, is_async=True)
            cr = warpgroup_mma(x_tile, state, nothing, use_acc=False, is_async=True)
            ck, cw = warpgroup_mma_wait(2, deps=[ck, cw])
        else:
            ck, cw = warpgroup_mma_wait(0, deps=[ck, cw])
        back = exp2(-orders)
        of_q = held(q_hat, WIDE)
        ck_out = ((ck + own * of_q) * back).to(gl.bfloat16)
        cw_out = ((cw + own_w * of_q) * back).to(gl.bfloat16)

        # Queries.
        if LONG:
            cq, cr = warpgroup_mma_wait(0, deps=[cq, cr])
            fence_async_shared()
            gl.thread_barrier()  # the states and cotangents are used up
            bring(1, full, sources, buffers, next_place, work, group, C, K, V, PACKED)
        fade = exp2(factors.index(0).load(of_channels))[None, :]
        cq = cq * (fade * scale)
        cr = cr * fade
        cq = warpgroup_mma(g_tile, k_hat, cq, is_async=True)
        cr = warpgroup_mma(n_tile, k_hat, cr, is_async=True)
        cq = warpgroup_mma(g_w_tile, w_hat, cq, is_async=True)
        cr = warpgroup_mma(n_w_tile, w_hat, cr, is_async=True)
        cq, cr = warpgroup_mma_wait(0, deps=[cq, cr])
        if DDECAY:
            met = met + held(q_hat, WIDE) * cq
            gl.thread_barrier()  # products of cotangents and values are used up
            split(held(r_hat, WIDE) * cr, result, result_low)
        cr = warpgroup_mma(near, k_hat, cr, is_async=True)
        cr = warpgroup_mma(near_w, w_hat, cr, is_async=True)
        cq_out = ((cq + own * held(k_hat, WIDE) + own_w * held(w_hat, WIDE)) * exp2(orders)).to(gl.bfloat16)
        cr = warpgroup_mma_wait(0, deps=[cr])
        gl.thread_barrier()  # gradients take the place of what they are the gradients of
        q_hat.store(cq_out)
        k_hat.store(ck_out)
        w_hat.store(cw_out)
        time = first.to(gl.int64) + row
        channel = gl.arange(0, K, of_channels)[None, :]
        stride = decay_token // 4 * 4
        a = gl.load(decay + time * stride + head.to(gl.int64) * (decay_head // 4 * 4) + channel, mask=row < rows, other=0.0)
        hold(r_hat, cr * exp2(orders - gl.maximum(a.to(gl.float32), NATURAL_RESET) * LOG2E))
        fence_async_shared()
        gl.thread_barrier()
        send_off(to_dq, q_hat, head, first, rows, C, K)
        send_off(to_dk, k_hat, head, first, rows, C, K)
        send_off(to_dr, r_hat, head, first, rows, C, K)
        send_off(to_dw, w_hat, head, first, rows, C, K)

        # The decay's gradient: of what is read across a token, of what is sent past it, and of what passes the chunk.
        if DDECAY:
            split(met, high, low)
            fence_async_shared()
            gl.thread_barrier()
            earlier, here_on, later = pick(column < row, WIDE), pick(column >= row, WIDE), pick(column > row, WIDE)
            dd = warpgroup_mma(earlier, sent_low, nothing, use_acc=False, is_async=True)
            dd = warpgroup_mma(earlier, sent, dd, is_async=True)
            dd = warpgroup_mma(here_on, low, dd, is_async=True)
            dd = warpgroup_mma(here_on, high, dd, is_async=True)
            dd = warpgroup_mma(later, result_low, dd, is_async=True)
            dd = warpgroup_mma(later, result, dd, is_async=True)
            dd = warpgroup_mma_wait(0, deps=[dd])
            past = factors.index(2).load(of_channels) * exp2(factors.index(0).load(of_channels)) * factors.index(1).load(of_channels)
            to = ddecay + (time * heads + head) * K + channel
            gl.store(to, (dd + past[None, :]).to(ddecay.dtype.element_ty), mask=row < rows)
        fence_async_shared()
        gl.thread_barrier()
        bring(0, full, sources, buffers, next_place, work, group, C, K, V, PACKED)
        if not LONG:
            bring(1, full, sources, buffers, next_place, work, group, C, K, V, PACKED)
        tma.store_wait(0)
        gl.thread_barrier()
        bring(2, full, sources, buffers, next_place, work, group, C, K, V, PACKED)
        place = next_place
        i += 1


def fits(
    family: Family, chunk: int, q: Tensor, k: Tensor, v: Tensor, read: Tensor | None, write: Tensor | None, do: Tensor, decay: Tensor
) -> bool:
    """Whether this kernel can do its part of ``gradients.gradients``. A decay's strides may be 0."""
    known = family.half and family.rule == ERASE and family.decay == CHANNEL and not family.before and chunk == hopper.CHUNK
    even = decay.data_ptr() % 16 == 0 and decay.stride(1) % 4 == decay.stride(2) % 4 == 0 and decay.stride(3) == 1
    held = decay.dtype in (torch.bfloat16, torch.float32)
    return known and even and held and hopper.fits((k.shape[3], v.shape[3]), q, k, v, read, write, do)


def options(size_k: int, size_v: int) -> dict[str, int]:
    """A warpgroup for 64 channels, with all the registers that a thread can have; how many ``programs`` share a multiprocessor."""
    return dict(programs=2 if size_k == size_v == BLOCK.value else 1, num_warps=size_k // 16, maxnreg=255)
