"""The plain rule with a decay per head in fused.py. With P = Q Kᵀ ∘ D and G = dO Vᵀ ∘ D on and below the diagonal,

dVᵀ = to_end (dSᵀKᵀ) + dOᵀP     dS'ᵀ = λ dSᵀ + dOᵀQ     dQ = fade (dO Sᵀ) + G K     dK = to_end (V dSᵀ) + Gᵀ Q
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.common import M, final_state, give_back, weight
from linattn.ops.triton.hopper.fused_parts import ALONG_K, LEFT_OF_C, LEFT_OF_K, ROWS, SQUARE, TOKENS, begin, over_states, over_values
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import C, in_blocks


@gluon.jit
def half(part: gl.constexpr, bars, sources, tiles, weights, results, ends, here, scale, shape):
    """Scan the cotangent of half of the values, and compute one matrix of pairs and the gradients of half of the channels."""
    K: gl.constexpr = shape.K
    start, end, finishes, V = ends
    nothing, token, other, s, channels, columns = begin(part, start, V, K)

    for i in range(here.count):
        chunk = here.count - 1 - i
        phase = i & 1
        at = i % 2
        zero = chunk >> 30  # recomputed in each step, so that dependent values do not stay in registers
        q, k = tiles.q.index(at), tiles.k.index(at)

        # Pairs of tokens: P, or G.
        mbarrier.wait(bars.pair_full.index(at), i // 2 & 1)
        met = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        rounded = s.to(gl.bfloat16)
        dv = warpgroup_mma(gl.convert_layout(rounded, LEFT_OF_C), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(bars.value_full.index(0), phase)
        if part:
            pairs = over_values(tiles.do, tiles.e, zero, nothing)
        mbarrier.wait(bars.used.index(0), phase ^ 1)
        tiles.ds.index(zero + part).permute((1, 0)).store(rounded)
        mbarrier.wait(bars.decay_full.index(at), i // 2 & 1)
        steps = weights.steps.index(at).load(ROWS)[:, None] - weights.steps.index(at).load(TOKENS)[None, :]
        factor = weight(steps, shape.BITS) * scale
        if part:
            met, dv, pairs = warpgroup_mma_wait(0, deps=[met, dv, pairs])
        else:
            met, dv = warpgroup_mma_wait(0, deps=[met, dv])
            pairs = met
        pairs = gl.where(token >= other, pairs * factor, 0.0)
        tiles.pairs.index(zero + part).store(pairs.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(bars.paired.index(0), count=1)
        do = tiles.do.index(zero + part).permute((1, 0)).load(SQUARE)
        dv = dv * weights.to_end.index(at).load(TOKENS)[None, :]
        reads = (do.to(gl.float32) * (weights.to_here.index(at).load(TOKENS) * scale)[None, :]).to(gl.bfloat16)
        s = s * weights.fade.index(at).load(gl.SliceLayout(0, ALONG_K))[None, :]
        s = warpgroup_mma(gl.convert_layout(reads, LEFT_OF_K), q, s, is_async=True)
        if part:
            met = gl.where(token > other, pairs * met, 0.0)
            crossing = gl.sum(met, 1)
            mbarrier.wait(bars.sum_empty.index(0), phase ^ 1)
            results.index(3).store(gl.sum(met, 0))
        else:
            mbarrier.wait(bars.sum_empty.index(0), phase ^ 1)

        # The cotangents of the values.
        mbarrier.wait(bars.paired.index(0), phase)
        dv = warpgroup_mma(gl.convert_layout(do, LEFT_OF_C), tiles.pairs.index(zero), dv, is_async=True)
        s, dv = warpgroup_mma_wait(0, deps=[s, dv])
        mbarrier.arrive(bars.scanned.index(0), count=1)  # and has read the other half of q and k
        dq = over_states(tiles.do, tiles.s, zero, part, nothing)
        dk = over_states(tiles.e, tiles.ds, zero, part, nothing)
        tma.store_wait(0)
        mbarrier.arrive(bars.pair_empty.index(1 - at), count=1, pred=i > 0)  # gradients have been stored from the memory of q and k
        tiles.dv.index(zero + part).permute((1, 0)).store(dv.to(gl.bfloat16))
        fence_async_shared()
        tma.store(sources.dv, [chunk * C, part * M], tiles.dv.index(zero + part))

        # Gradients of half of the channels.
        dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
        give_back(bars.value_empty.index(0))
        from_start = weights.to_here.index(at).load(ROWS)[:, None]
        to_end = weights.to_end.index(at).load(ROWS)[:, None]
        give_back(bars.decay_empty.index(at))
        dq = dq * (from_start * scale)
        dk = dk * to_end
        q_half, k_half = in_blocks(q, C, K).index(part), in_blocks(k, C, K).index(part)
        reading = gl.sum(q_half.load(SQUARE).to(gl.float32) * dq, 1)
        results.index(part).store(crossing + reading if part else reading)
        results.index(4 + part).store(gl.sum(k_half.load(SQUARE).to(gl.float32) * dk, 1))
        mbarrier.arrive(bars.sum_full.index(0), count=1)
        g = tiles.pairs.index(zero + 1)
        dq = warpgroup_mma(g, k_half, dq, is_async=True)
        dk = warpgroup_mma(g.permute((1, 0)), q_half, dk, is_async=True)
        dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
        mbarrier.arrive(bars.used.index(0), count=1)
        mbarrier.wait(bars.scanned.index(0), phase)
        q_half.store(dq.to(gl.bfloat16))
        k_half.store(dk.to(gl.bfloat16))
        fence_async_shared()
        tma.store(sources.dq, [chunk * C, part * M], q_half)
        tma.store(sources.dk, [chunk * C, part * M], k_half)

    tma.store_wait(0)
    if finishes and end is not None:
        final_state(end, s, channels, columns, V)
