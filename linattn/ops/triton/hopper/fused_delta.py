"""The delta rule in fused.py, with no decay or one per head. With G = dO Eᵀ ∘ D on and below the diagonal and N = -dV Eᵀ ∘ D below it,

dEᵀ = to_end (dSᵀKᵀ) + dOᵀP     dVᵀ = dEᵀB     dS'ᵀ = λ dSᵀ + dOᵀQ - dVᵀK
dQ = fade (dO Sᵀ) + G K         dK = to_end (E dSᵀ) + Gᵀ Q - fade (dV Sᵀ) + (N + Nᵀ) K
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.common import M, away_from_zero, final_state, give_back, weight
from linattn.ops.triton.hopper.fused_parts import ALONG_K, LEFT_OF_C, LEFT_OF_K, ROWS, SQUARE, TOKENS, begin, over_states, over_values
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import C, in_blocks
from linattn.ops.triton.tiles import HEAD


class Strengths(NamedTuple):
    """Strengths of a head from the segment's first token on, and the addresses of their gradients."""

    base: Any
    token: Any
    to: Any


@gluon.jit
def save_strengths(n, b, strengths, here, row, token, other):
    """Store the gradients of the strengths ``b``, the diagonal of the products ``n`` of cotangents and values over their squares."""
    b = away_from_zero(b.to(gl.float32))
    d = gl.sum(gl.where(token == other, n, 0.0), 1) / (b * b)
    to = strengths.to + (here.time + row) * here.heads + here.head
    gl.store(to, d.to(strengths.to.dtype.element_ty), mask=row < here.rows)


@gluon.jit
def half(part: gl.constexpr, bars, sources, tiles, weights, strengths, results, ends, here, scale, shape):
    """Scan the cotangent of half of the values, and compute one matrix of pairs and the gradients of half of the channels."""
    K: gl.constexpr = shape.K
    SUMS: gl.constexpr = shape.SUMS
    start, end, finishes, V = ends
    nothing, token, other, s, channels, columns = begin(part, start, V, K)

    for i in range(here.count):
        chunk = here.count - 1 - i
        phase = i & 1
        at = i % 2
        zero = chunk >> 30  # recomputed in each step, so that dependent values do not stay in registers
        q, k = tiles.q.index(at), tiles.k.index(at)
        if part:  # loaded early, to hide its latency
            row = chunk * C + gl.arange(0, C, ROWS)
            b = gl.load(strengths.base + row.to(gl.int64) * strengths.token, mask=row < here.rows, other=1.0)

        # The cotangents of the values, and of the state before the chunk.
        mbarrier.wait(bars.pair_full.index(at), i // 2 & 1)
        rounded = s.to(gl.bfloat16)
        dv = warpgroup_mma(gl.convert_layout(rounded, LEFT_OF_C), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(bars.used.index(0), phase ^ 1)
        tiles.ds.index(zero + part).permute((1, 0)).store(rounded)
        mbarrier.wait(bars.value_full.index(0), phase)
        if SUMS:  # of the state that passes the whole chunk
            passing = gl.sum(s * tiles.s.index(zero + part).permute((1, 0)).load(ALONG_K).to(gl.float32), 1)
        do = tiles.do.index(zero + part).permute((1, 0)).load(SQUARE)
        reads = do
        dv = warpgroup_mma_wait(0, deps=[dv])
        if shape.DECAY == HEAD:
            mbarrier.wait(bars.decay_full.index(at), i // 2 & 1)
            dv = dv * weights.to_end.index(at).load(TOKENS)[None, :]
            reads = (do.to(gl.float32) * (weights.to_here.index(at).load(TOKENS) * scale)[None, :]).to(gl.bfloat16)
            s = s * weights.fade.index(at).load(gl.SliceLayout(0, ALONG_K))[None, :]
        else:
            reads = (do.to(gl.float32) * scale).to(gl.bfloat16)
        mbarrier.wait(bars.square_full.index(0), phase)
        dv = warpgroup_mma(gl.convert_layout(do, LEFT_OF_C), tiles.p.index(zero), dv, is_async=True)
        dv = warpgroup_mma_wait(0, deps=[dv])
        written = gl.convert_layout(dv.to(gl.bfloat16), LEFT_OF_C)
        dv = warpgroup_mma(written, tiles.b.index(zero), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma(gl.convert_layout(reads, LEFT_OF_K), q, s, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv])
        mbarrier.arrive(bars.square_empty.index(0), count=1)
        tma.store_wait(0)
        mbarrier.arrive(bars.pair_empty.index(1 - at), count=1, pred=i > 0)  # gradients have been stored from the memory of q and k
        tiles.dv.index(zero + part).permute((1, 0)).store(dv.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(bars.scanned.index(0), count=1)
        tma.store(sources.dv, [chunk * C, part * M], tiles.dv.index(zero + part))
        back = -dv
        if shape.DECAY == HEAD:
            back = back * weights.to_here.index(at).load(TOKENS)[None, :]
        s = warpgroup_mma(gl.convert_layout(back.to(gl.bfloat16), LEFT_OF_K), k, s, is_async=True)

        # Pairs of tokens.
        mbarrier.wait(bars.scanned.index(0), phase)
        pairs = over_values(tiles.dv if part else tiles.do, tiles.e, zero, nothing)
        s, pairs = warpgroup_mma_wait(0, deps=[s, pairs])
        dq = over_states(tiles.do, tiles.s, zero, part, nothing)
        if part:
            save_strengths(pairs, b, strengths, here, row, token, other)
        if shape.DECAY == HEAD:
            steps = weights.steps.index(at).load(ROWS)[:, None] - weights.steps.index(at).load(TOKENS)[None, :]
            pairs = pairs * weight(steps, shape.BITS)
        if part:
            pairs = gl.where(token > other, -pairs, 0.0)
        elif SUMS:  # a token's pair with itself does not contribute to the decay's gradient
            pairs = pairs * scale
            results.index(2).store(gl.sum(gl.where(token == other, pairs, 0.0), 1))
            pairs = gl.where(token > other, pairs, 0.0)
        else:
            pairs = gl.where(token >= other, pairs * scale, 0.0)
        tiles.pairs.index(zero + part).store(pairs.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(bars.paired.index(0), count=1)  # and has read the other half of q and k

        # Gradients of half of the channels.
        dr = over_states(tiles.dv, tiles.s, zero, part, nothing)
        dk = over_states(tiles.e, tiles.ds, zero, part, nothing)
        dq, dr, dk = warpgroup_mma_wait(0, deps=[dq, dr, dk])
        mbarrier.arrive(bars.value_empty.index(0), count=1)
        if shape.DECAY == HEAD:
            from_start = weights.to_here.index(at).load(ROWS)[:, None]
            to_end = weights.to_end.index(at).load(ROWS)[:, None]
            give_back(bars.decay_empty.index(at))
            dq = dq * (from_start * scale)
            dr = dr * -from_start
            dk = dk * to_end
        else:
            dq = dq * scale
            dr = -dr
        q_half, k_half = in_blocks(q, C, K).index(part), in_blocks(k, C, K).index(part)
        g, n = tiles.pairs.index(zero), tiles.pairs.index(zero + 1)
        if SUMS:  # of reads across each token: Σ q dq + k dr, of writes after it: Σ k (Gᵀ Q + Nᵀ K) and, past the chunk, Σ k dk
            sending = gl.sum(k_half.load(SQUARE).to(gl.float32) * dk, 1)
            mbarrier.wait(bars.paired.index(0), phase)
            dr = warpgroup_mma(n, k_half, dr, is_async=True)
            dr = warpgroup_mma_wait(0, deps=[dr])
            dk = dk + dr
            crossing = gl.sum(k_half.load(SQUARE).to(gl.float32) * dr, 1)
            dq = warpgroup_mma(g, k_half, dq, is_async=True)
            inner = warpgroup_mma(g.permute((1, 0)), q_half, nothing, use_acc=False, is_async=True)
            inner = warpgroup_mma(n.permute((1, 0)), k_half, inner, is_async=True)
            dq, inner = warpgroup_mma_wait(0, deps=[dq, inner])
            mbarrier.arrive(bars.used.index(0), count=1)
            own = results.index(2).load(ROWS)[:, None]
            keys = k_half.load(SQUARE).to(gl.float32)
            crossing -= gl.sum(keys * inner, 1)
            dk = dk + inner
            queries = q_half.load(SQUARE).to(gl.float32)
            crossing += gl.sum(queries * dq, 1)
            dk = dk + own * queries
            dq = dq + own * keys
            mbarrier.wait(bars.sum_empty.index(0), phase ^ 1)
            results.index(part).store(crossing)
            results.index(4 + part).store(sending)
            results.index(6 + part).store(passing)
            mbarrier.arrive(bars.sum_full.index(0), count=1)
        else:
            dk = dk + dr
            mbarrier.wait(bars.paired.index(0), phase)
            dq = warpgroup_mma(g, k_half, dq, is_async=True)
            dk = warpgroup_mma(g.permute((1, 0)), q_half, dk, is_async=True)
            dk = warpgroup_mma(n, k_half, dk, is_async=True)
            dk = warpgroup_mma(n.permute((1, 0)), k_half, dk, is_async=True)
            dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
            mbarrier.arrive(bars.used.index(0), count=1)
        q_half.store(dq.to(gl.bfloat16))
        k_half.store(dk.to(gl.bfloat16))
        fence_async_shared()
        tma.store(sources.dq, [chunk * C, part * M], q_half)
        tma.store(sources.dk, [chunk * C, part * M], k_half)

    tma.store_wait(0)
    if finishes and end is not None:
        final_state(end, s, channels, columns, V)
