"""``gradients`` with a decay per channel and the erase rule for Hopper, in Gluon: chunks that settle. Persistent programs.

Two kinds of queries, q and r, which reads before its token's decay, are paired with two kinds of keys, k and w. All are scaled to the
middle of the chunk, Q̂ = Q ∘ e, R̂ = R ∘ f, K̂ = K / e, Ŵ = W / e, so that pairs have no decays. With U the erasing writes, X the
cotangents of the reads, G = dO Vᵀ, G' = dO Uᵀ, N = X Vᵀ and N' = X Uᵀ, all four strictly below the diagonal:

    dQ = e ∘ D + own ∘ K + own' ∘ W,   D = fade dO Sᵀ + G K̂ + G' Ŵ        dR = f ∘ E,   E = fade X Sᵀ + N K̂ + N' Ŵ
    dK = (end V dSᵀ + P) / e + own ∘ Q,   P = Gᵀ Q̂ + Nᵀ R̂                 dW = (end U dSᵀ + P') / e + own' ∘ Q,   P' = G'ᵀ Q̂ + N'ᵀ R̂

The decay's gradient sums, over tokens on one side or the other, Q̂ ∘ D, R̂ ∘ E, -K̂ ∘ P - Ŵ ∘ P' and the parts past a token; pairs on one
side of a token cancel, because both ends are rounded equally. Between r and the token right before it there is no decay: these pairs
are added afterwards.

One warp prefetches. All others share the work on 64 channels at a time, with few tiles in registers, while the operands of the next 64
channels or the next chunk are loaded to shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.call import gradients_of, values_of, vectors_of
from linattn.ops.triton.hopper.chunks import Chunk, chunk, fetch, of_states, send, state_at
from linattn.ops.triton.hopper.common import barriers, buffer, numbers
from linattn.ops.triton.hopper.decays import columns, halves, lay_out
from linattn.ops.triton.hopper.names import barrier, fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import (
    BLOCK,
    C,
    again,
    copies,
    exp2,
    held,
    hold,
    in_blocks,
    passing,
    pick,
    pinned,
    scaled,
    shares,
    split,
    start_products,
    start_sum,
)  # fmt: skip
from linattn.ops.triton.hopper.settled import any_settles, seek
from linattn.ops.triton.tiles import LOG2E


class Sources(NamedTuple):
    """Tensors that TMA reads."""

    of_v: Any  # v, u, dO, X
    states: Any  # the state's cotangent, the state
    vectors: Any  # q, k, r, w


class Tiles(NamedTuple):
    """Shared memory that is loaded, as :class:`Sources`."""

    of_v: Any
    states: Any
    vectors: Any  # then their gradients


class Kept(NamedTuple):
    """Shared memory of results."""

    met: Any  # G, G', N, N', and the entries of neighbours of the latter two
    sums: Any  # decays, then the parts past a token and across it, from or after each token, split in two bfloat16 numbers
    factors: Any  # by channel, half of the orders, their weight, and the product of the state and its cotangent
    weights: Any  # weights of a query's own token: of k, of w


@gluon.jit
def load(full, empty, sources, tiles, work, call, sizes):
    """Prefetch tiles into free buffers, in the order in which these become free."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    i = 0
    for place in range(gl.program_id(0), work.places, gl.num_programs(0)):
        at = chunk(place, work, sizes.PACKED)
        if at.rows > 0:
            for block in range(BLOCKS):
                j = i * BLOCKS + block
                here = full.index(1)
                mbarrier.wait(empty.index(1), (j & 1) ^ 1)
                mbarrier.expect(here, 4 * BLOCK * sizes.V)
                of_state = state_at(place, block * BLOCK, sizes.K, sizes.V, sizes.SPLIT)
                for part in gl.static_range(2):
                    tma.load(sources.states[part], of_state, here, tiles.states[part].index(0))
                if block == 0:
                    here = full.index(0)
                    mbarrier.wait(empty.index(0), (i & 1) ^ 1)
                    mbarrier.expect(here, 8 * C * sizes.V)
                    for part in gl.static_range(4):
                        fetch(sources.of_v[part], at, here, tiles.of_v[part].index(0), sizes.V)
                slot = j % sizes.STAGES
                here = full.index(2 + slot)
                mbarrier.wait(empty.index(2 + slot), (j // sizes.STAGES & 1) ^ 1)
                mbarrier.expect(here, 8 * C * BLOCK)
                for part in gl.static_range(4):
                    to = tiles.vectors[part].index(slot).reshape((1, 1, C, BLOCK))
                    of = at.head // (call.group if part < 2 else sizes.SPLIT)
                    tma.load(sources.vectors[part], [of, at.first + at.rows, C - at.rows, block * BLOCK], here, to)
            i += 1


@gluon.jit
def decays_of(call, place, at, block, work):
    """Load the decays of a chunk's block, 0 past the last chunk."""
    inside = gl.where(place < work.places, at.rows, 0)
    return halves(call.decays, Chunk(at.head, at.first, inside), block, columns(gl.num_warps(), 2))


@gluon.jit
def make(full, empty, results, tiles, kept, work, call, sizes):
    """Compute all gradients in blocks of 64 channels."""
    BLOCKS: gl.constexpr = sizes.K // BLOCK
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = shares(WARPS)
    WHOLE: gl.constexpr = copies(WARPS)
    of_channels: gl.constexpr = gl.SliceLayout(0, WIDE)
    of_tokens: gl.constexpr = gl.SliceLayout(1, WIDE)
    met, sums, factors, weights = kept
    nothing = gl.zeros([C, BLOCK], gl.float32, WIDE)
    zero = work.heads % call.group  # 0, unknown to the compiler, so that addresses of tiles are not kept in registers

    place = seek(gl.program_id(0), work, sizes.PACKED)
    at = chunk(place, work, sizes.PACKED)
    early, late = decays_of(call, place, at, 0, work)
    i = 0
    while place < work.places:
        next_place = seek(place + gl.num_programs(0), work, sizes.PACKED)
        next_at = chunk(next_place, work, sizes.PACKED)

        # Gradients of queries and keys from each other.
        still = i * zero
        of_v, of_u, of_do, of_x = tiles.of_v
        v_tile, u_tile, do_tile, x_tile = of_v.index(still), of_u.index(still), of_do.index(still), of_x.index(still)
        token = (gl.arange(0, C, of_tokens) + still)[:, None]
        other = gl.arange(0, C, of_channels)[None, :]
        mbarrier.wait(full.index(0), i & 1)
        g = warpgroup_mma(do_tile, v_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        g_w = warpgroup_mma(do_tile, u_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        n = warpgroup_mma(x_tile, v_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        n_w = warpgroup_mma(x_tile, u_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        g, g_w, n, n_w = warpgroup_mma_wait(0, deps=[g, g_w, n, n_w])
        g = g * call.scale
        g_w = g_w * call.scale
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
            still = j * zero
            slot = j % sizes.STAGES
            v_tile, u_tile, do_tile, x_tile = of_v.index(still), of_u.index(still), of_do.index(still), of_x.index(still)
            dstate, state = tiles.states[0].index(still).permute((1, 0)), tiles.states[1].index(still).permute((1, 0))
            vectors = tiles.vectors
            q_hat, k_hat, r_hat, w_hat = vectors[0].index(slot), vectors[1].index(slot), vectors[2].index(slot), vectors[3].index(slot)
            g_tile, g_w_tile, n_tile, n_w_tile = met[0].index(still), met[1].index(still), met[2].index(still), met[3].index(still)
            near, near_w, high, low = met[4].index(still), met[5].index(still), sums[0].index(still), sums[1].index(still)
            sum_high, sum_low, far_high, far_low = sums[2].index(still), sums[3].index(still), sums[4].index(still), sums[5].index(still)
            ahead, ahead_at, next_block = place, at, block + 1
            if block == BLOCKS - 1:
                ahead, ahead_at, next_block = next_place, next_at, 0
            row = (gl.arange(0, C, gl.SliceLayout(1, WHOLE)) + still)[:, None]
            column = gl.arange(0, C, gl.SliceLayout(0, WHOLE))[None, :]

            # Gradients of keys from the state's cotangent, and of queries from the state.
            mbarrier.wait(full.index(1), j & 1)
            ck = warpgroup_mma(v_tile, dstate, nothing, use_acc=False, is_async=True)
            cw = warpgroup_mma(u_tile, dstate, nothing, use_acc=False, is_async=True)
            cq = warpgroup_mma(do_tile, state, nothing, use_acc=False, is_async=True)
            cr = warpgroup_mma(x_tile, state, nothing, use_acc=False, is_async=True)
            middle = lay_out(early, late, sums[0], sums[1], still, True)
            factors.index(0).store(middle)
            factors.index(1).store(exp2(middle))
            if sizes.DDECAY:
                dstates, states = in_blocks(tiles.states[0].index(0), BLOCK, sizes.V), in_blocks(tiles.states[1].index(0), BLOCK, sizes.V)
                factors.index(2).store(gl.sum(passing(dstates, states, sizes.V), 1))
            ck, cw, cq, cr = warpgroup_mma_wait(0, deps=[ck, cw, cq, cr])
            fence_async_shared()
            barrier()  # the states have been read, and the decays are loaded
            mbarrier.arrive(empty.index(1), count=1)
            if block == BLOCKS - 1:
                mbarrier.arrive(empty.index(0), count=1)

            # log2 decays between the middle and after each token (e), or before it (f).
            orders = start_sum(pick(column <= row), sums[0], sums[1], still, True)
            own_steps = held(high) + held(low)
            orders = warpgroup_mma_wait(0, deps=[orders]) * LOG2E - factors.index(0).load(of_channels)[None, :]
            fade = factors.index(1).load(of_channels)[None, :]
            f = exp2(orders - own_steps * LOG2E)
            mbarrier.wait(full.index(2 + slot), j // sizes.STAGES & 1)
            of_q, of_k, of_r, of_w = q_hat.load(WIDE), k_hat.load(WIDE), r_hat.load(WIDE), w_hat.load(WIDE)
            barrier()  # all of it is in registers, and the decays have been read
            scaled(q_hat, of_q, exp2(orders))
            scaled(r_hat, of_r, f)
            back = exp2(-orders)
            of_k, of_w = scaled(k_hat, of_k, back), scaled(w_hat, of_w, back)

            # Gradients across the ends of the chunk, and of queries and keys from each other.
            ck = ck * fade
            cw = cw * fade
            cq = cq * (fade * call.scale)
            cr = cr * fade
            if sizes.DDECAY:
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
            if sizes.DDECAY:
                across_it = pinned(across_it - held(k_hat) * ck - held(w_hat) * cw + held(q_hat) * cq)
                split(held(r_hat) * cr, far_high, far_low)
            ck = warpgroup_mma(near.permute((1, 0)), r_hat, ck, is_async=True)
            cw = warpgroup_mma(near_w.permute((1, 0)), r_hat, cw, is_async=True)
            cr = warpgroup_mma(near, k_hat, cr, is_async=True)
            cr = warpgroup_mma(near_w, w_hat, cr, is_async=True)
            if sizes.DDECAY:
                split(across_it, sum_high, sum_low)
            own = weights.index(0).load(of_tokens)[:, None]
            own_w = weights.index(1).load(of_tokens)[:, None]
            dq_out = ((cq + own * held(k_hat) + own_w * held(w_hat)) * again(orders)).to(gl.bfloat16)
            ck, cw, cr = warpgroup_mma_wait(0, deps=[ck, cw, cr])
            of_q = held(q_hat)
            barrier()  # gradients overwrite their operands
            back = again(-orders)
            hold(k_hat, (ck + own * of_q) * back)
            hold(w_hat, (cw + own_w * of_q) * back)
            q_hat.store(dq_out)
            hold(r_hat, cr * f)
            fence_async_shared()
            barrier()
            for part in gl.static_range(4):
                send(results[part], at, block, tiles.vectors[part].index(slot))

            early, late = decays_of(call, ahead, ahead_at, next_block, work)

            # The decay's gradient: of reads across a token, of writes past it, and of the state that passes the chunk.
            if sizes.DDECAY:
                earlier, here_on, later = pick(column < row), pick(column >= row), pick(column > row)
                dd = start_products((
                    (earlier, low), (earlier, high), (here_on, sum_low), (here_on, sum_high), (later, far_low), (later, far_high),
                ))  # fmt: skip
                weight = factors.index(1).load(of_channels)
                past = factors.index(2).load(of_channels) * (weight * weight)
                time = (gl.arange(0, C, of_tokens) + still)[:, None]
                channel = block * BLOCK + gl.arange(0, BLOCK, of_channels)[None, :]
                to = call.ddecay + ((at.first.to(gl.int64) + time) * work.heads + at.head) * sizes.K + channel
                dd = warpgroup_mma_wait(0, deps=[dd]) + past[None, :]
                gl.store(to, dd.to(call.ddecay.dtype.element_ty), mask=time < at.rows)
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(empty.index(2 + slot), count=1)
        place = next_place
        at = next_at
        i += 1
    tma.store_wait(0)


@gluon.jit
def gradients(call, work, sizes):
    """Compute all gradients of this program's chunks, unless no block of channels settles in any."""
    if any_settles(work, call, sizes):
        compute(call, work, sizes)


@gluon.jit
def compute(call, work, sizes):
    key_heads = work.heads // call.group
    of_v = values_of(call, work, sizes)
    dstates = of_states(call.dstates, work.places, sizes.K, sizes.V, sizes.SPLIT, BLOCK)
    states = of_states(call.states, work.places, sizes.K, sizes.V, sizes.SPLIT, BLOCK)
    vectors, results = vectors_of(call, work, sizes, key_heads, BLOCK), gradients_of(call, work, sizes, BLOCK)
    tiles = Tiles(
        (buffer(1, C, sizes.V), buffer(1, C, sizes.V), buffer(1, C, sizes.V), buffer(1, C, sizes.V)),
        (buffer(1, BLOCK, sizes.V), buffer(1, BLOCK, sizes.V)),
        (buffer(sizes.STAGES, C, BLOCK), buffer(sizes.STAGES, C, BLOCK), buffer(sizes.STAGES, C, BLOCK), buffer(sizes.STAGES, C, BLOCK)),
    )
    met = (buffer(1, C, C), buffer(1, C, C), buffer(1, C, C), buffer(1, C, C), buffer(1, C, C), buffer(1, C, C))
    sums = (buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK), buffer(1, C, BLOCK))
    kept = Kept(met, sums, numbers(3, BLOCK, gl.float32), numbers(2, C, gl.float32))
    full, empty = barriers(2 + sizes.STAGES, 1), barriers(2 + sizes.STAGES, 1)  # v, u, do, x; states; q, k, r, w
    fence_async_shared()
    gl.warp_specialize([
        (make, (full, empty, results, tiles, kept, work, call, sizes)),
        (load, (full, empty, Sources(of_v, (dstates, states), vectors), tiles, work, call, sizes)),
    ], [1], [24])  # fmt: skip


def options(size_v: int) -> dict[str, int]:
    """Number of blocks of channels in flight, and registers of a thread. A multiprocessor runs one program at a time."""
    return dict(programs=1, STAGES=128 // size_v, num_warps=8, maxnreg=168)
