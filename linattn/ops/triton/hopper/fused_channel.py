"""Backward pass within segments for Hopper, in Gluon: plain rule, bfloat16 decays per channel, 128 keys and 128 values.

As fused.py: one kernel scans the cotangent of the state and computes the gradients of each chunk that settles. With Λ the decay [K] of its
n tokens, h = √Λ, and e [C, K] the decay up to each token over h, scaled queries and keys have no decay between them. Let Λ ≥ 2^(LEAST n):

    Q̂ = scale e Q     K̂ = K / e     P = Q̂ K̂ᵀ, G = dO Vᵀ on and below the diagonal     dŜ = h dS
    dVᵀ = dŜᵀK̂ᵀ + dOᵀP                       dS'ᵀ = h (dŜᵀ + dOᵀQ̂)
    dQ = scale e (h (dO Sᵀ) + G K̂) = scale e dQ̂    dK = (V dŜᵀ + Gᵀ Q̂) / e = dK̂ / e

A row of h scales a channel. e and 1 / e are within 2^60 of 1. The logarithmic decay at token t multiplies every weight across t, so its
gradient is the sum of E = Q̂ ∘ dQ̂ - K̂ ∘ dK̂ from t on, and over values that of the state after the chunk, h (h S + K̂ᵀV), times dS. A
token's pair with itself cancels in E.

A chunk with less in some channel is not ``settled``: queries decayed from its start and keys to its end are Q̂ and K̂,

    dVᵀ = dSᵀK̂ᵀ + dOᵀP     dS'ᵀ = Λ dSᵀ + dOᵀQ̂

and its dS is written for levels_plain.py, which computes its gradients. The scan has the same products in both; P is prepared.

Each of two warpgroups scans half of the values and then computes the gradients of half of the channels: 64 registers a thread for the
cotangent, three tiles [C, C] of 32 at most. A third scales the next chunk's queries and keys and sums the gradient of the decay; two
warps prefetch. Of 227 KB of shared memory, q, k and decays take 96 in two stages, dO and V 32, S and dŜ 64, dV 16, P and G 16. After
its products a half reuses its tiles: E is split in two bfloat16 numbers, high in dV's and low in Q̂'s, dQ goes out from the decays' and
dK from K̂'s.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.chunks import Chunk
from linattn.ops.triton.hopper.common import M, barriers, buffer, described, final_state, first_slot, give_back, locate, numbers
from linattn.ops.triton.hopper.decays import save_gradients
from linattn.ops.triton.hopper.fused_parts import (
    ALONG_K,
    LEFT_OF_C,
    LEFT_OF_K,
    SQUARE,
    TOKENS,
    Bars,
    Segment,
    begin,
    over_states,
    over_values,
)
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, reinterpret, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import BLOCK, NATURAL_RESET, C, exp2, held, hold, in_blocks, in_rows, pick, pinned, split
from linattn.ops.triton.tiles import LOG2E

# Binary orders of a token's decay, on average, down to which a chunk settles: 2^-120 for 64 tokens is normal, and its root scales both
# sides. Fewer decay no faster: in the decay's gradient a token's pair with itself leaves rounding, beside which strong decays have none.
LEAST = gl.constexpr(-1.875)


class Tiles(NamedTuple):
    """Shared memory; queries, keys and decays in two stages, values in two halves."""

    q: Any
    k: Any
    decay: Any
    do: Any
    v: Any
    s: Any
    p: Any
    ds: Any
    dv: Any
    g: Any


class Sources(NamedTuple):
    """Tensors in global memory that TMA reads and writes."""

    q: Any
    k: Any
    decay: Any
    do: Any
    v: Any
    s: Any
    p: Any
    ds: Any
    dv: Any
    dq: Any
    dk: Any


class Weights(NamedTuple):
    """By stage, whether the chunk settles (1 or 0), and by channel h, or Λ of one that does not."""

    settled: Any
    fade: Any


@gluon.jit
def settles(weights, at):
    return gl.max(weights.settled.index(at).load(TOKENS), 0) > 0


@gluon.jit
def roots(weights, at, block, K: gl.constexpr, layout: gl.constexpr):
    """``weights.fade`` [BLOCK] of a block of channels."""
    blocks = reinterpret(weights.fade, gl.float32, [2 * K // BLOCK, BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return blocks.index(at * (K // BLOCK) + block).load(layout)


@gluon.jit
def orders(UP: gl.constexpr, decay, zero):
    """Decays [C, BLOCK] in binary orders from the start of the chunk up to each token, or after it; ``zero`` is 0, unknown to the compiler:
    see prepare_channel.py.
    """
    token = gl.arange(0, C, gl.SliceLayout(1, SQUARE))[:, None] + zero
    other = gl.arange(0, C, TOKENS)[None, :]
    x = gl.zeros([C, BLOCK], gl.float32, SQUARE)
    x = warpgroup_mma(pick(other <= token if UP else other > token), decay, x, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[x]) * LOG2E


@gluon.jit
def half(part: gl.constexpr, bars, sources, tiles, weights, ends, here, scale, K: gl.constexpr):
    """Scan the cotangent of half of the values, and compute the gradients of half of the channels of chunks that settle."""
    start, given, end, finishes, V = ends
    by_channel: gl.constexpr = gl.SliceLayout(0, ALONG_K)
    nothing, token, other, s, channels, columns = begin(part, None, V, K)
    # A mask in place of ``begin``'s variant with zeros, in which ptxas serialises all products for want of registers.
    s = gl.load(start + channels[None, :] * V + columns[:, None], mask=(channels < given)[None, :], other=0.0)

    for i in range(here.count):
        chunk = here.count - 1 - i
        phase = i & 1
        at = i % 2
        zero = chunk >> 30  # recomputed in each step, so that dependent values do not stay in registers
        q, k = tiles.q.index(at), tiles.k.index(at)

        # The cotangents of the values and of the state before the chunk, and G.
        mbarrier.wait(bars.pair_full.index(at), i // 2 & 1)
        mbarrier.wait(bars.decay_full.index(at), i // 2 & 1)
        settled = settles(weights, at)
        s = pinned(s * gl.where(settled, weights.fade.index(at).load(by_channel), 1.0)[None, :])
        rounded = s.to(gl.bfloat16)
        mbarrier.wait(bars.used.index(0), phase ^ 1)
        tiles.ds.index(zero + part).permute((1, 0)).store(rounded)
        dv = warpgroup_mma(gl.convert_layout(rounded, LEFT_OF_C), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(bars.value_full.index(0), phase)
        if part:
            g = over_values(tiles.do, tiles.v, zero, nothing)
            dv, g = warpgroup_mma_wait(0, deps=[dv, g])
            tiles.g.index(zero).store(gl.where(token >= other, g, 0.0).to(gl.bfloat16))
        else:
            dv = warpgroup_mma_wait(0, deps=[dv])
        fence_async_shared()
        mbarrier.arrive(bars.paired.index(0), count=1)
        do = tiles.do.index(zero + part).permute((1, 0)).load(SQUARE)
        s = pinned(s * gl.where(settled, 1.0, weights.fade.index(at).load(by_channel))[None, :])
        dv = warpgroup_mma(gl.convert_layout(do, LEFT_OF_C), tiles.p.index(zero), dv, is_async=True)
        s = warpgroup_mma(gl.convert_layout(do, LEFT_OF_K), q, s, is_async=True)
        s, dv = warpgroup_mma_wait(0, deps=[s, dv])
        s = s * gl.where(settled, weights.fade.index(at).load(by_channel), 1.0)[None, :]
        tma.store_wait(0)
        mbarrier.arrive(bars.pair_empty.index(1 - at), count=1, pred=i > 0)  # gradients have been stored from the memory of decays and k
        mbarrier.wait(bars.sum_empty.index(0), phase ^ 1)
        tiles.dv.index(zero + part).permute((1, 0)).store(dv.to(gl.bfloat16))
        fence_async_shared()
        tma.store(sources.dv, [chunk * C, part * M], tiles.dv.index(zero + part))

        mbarrier.wait(bars.paired.index(0), phase)
        if settled:
            gradients(part, bars, sources, tiles, weights, at, phase, zero, chunk, scale, K)
        else:
            tma.store(sources.ds, [chunk * here.heads * K, part * M], tiles.ds.index(zero + part))
            give_back(bars.value_empty.index(0))
            mbarrier.arrive(bars.sum_full.index(0), count=1)
            tma.store_wait(0)
            mbarrier.arrive(bars.used.index(0), count=1)

    tma.store_wait(0)
    if finishes and end is not None:
        final_state(end, s, channels, columns, V)


@gluon.jit
def gradients(part: gl.constexpr, bars, sources, tiles, weights, at, phase, zero, chunk, scale, K: gl.constexpr):
    """Compute the gradients of half of the channels of a chunk, and E."""
    q, k = in_blocks(tiles.q.index(at), C, K).index(part), in_blocks(tiles.k.index(at), C, K).index(part)
    decay, g = in_blocks(tiles.decay.index(at), C, K).index(part), tiles.g.index(zero)
    nothing = gl.zeros([C, C], gl.float32, SQUARE)
    dq = over_states(tiles.do, tiles.s, zero, part, nothing)
    dk = over_states(tiles.v, tiles.ds, zero, part, nothing)
    dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
    give_back(bars.value_empty.index(0))
    dq = pinned(dq * roots(weights, at, part, K, TOKENS)[None, :])
    dq = warpgroup_mma(g, k, dq, is_async=True)
    dk = warpgroup_mma(g.permute((1, 0)), q, dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
    mbarrier.arrive(bars.used.index(0), count=1)
    across = held(q) * dq - held(k) * dk
    tma.store_wait(0)  # the cotangents of the values
    mbarrier.wait(bars.used.index(0), phase)  # the other half has read q and k, and so have the sums
    split(across, tiles.dv.index(zero + part), q)
    fence_async_shared()
    mbarrier.arrive(bars.sum_full.index(0), count=1)
    x = orders(True, decay, zero)
    root = roots(weights, at, part, K, TOKENS)
    hold(decay, dq * (exp2(x) * (scale / root)[None, :]))
    hold(k, dk * (exp2(-x) * root[None, :]))
    fence_async_shared()
    tma.store(sources.dq, [chunk * C, part * M], decay)
    tma.store(sources.dk, [chunk * C, part * M], k)


@gluon.jit
def scale_and_sum(bars, tiles, weights, results, ddecay, here, scale, K: gl.constexpr):
    """Scale the queries and keys of the next chunk, and sum the gradient of the decay of this one."""
    for n in range(here.count + 1):
        i = n - 1  # the chunk whose gradients are computed
        phase = i & 1
        if n > 0:
            mbarrier.wait(bars.value_full.index(0), phase)
            mbarrier.wait(bars.paired.index(0), phase)
            if settles(weights, i % 2):
                passing(tiles, weights, results, i % 2, K)
            give_back(bars.value_empty.index(0))
            mbarrier.arrive(bars.used.index(0), count=1)
        if n < here.count:
            mbarrier.wait(bars.pair_full.index(n % 2), n // 2 & 1)
            scale_pair(tiles, weights, n, scale, K)
            fence_async_shared()
            mbarrier.arrive(bars.decay_full.index(n % 2), count=1)
        if n > 0:
            mbarrier.wait(bars.sum_full.index(0), phase)
            if settles(weights, i % 2):
                add_up(tiles, results, ddecay, here, i % 2, here.count - n, K)
            mbarrier.arrive(bars.sum_empty.index(0), count=1)
            mbarrier.arrive(bars.pair_empty.index(i % 2), count=1)


@gluon.jit
def passing(tiles, weights, results, at, K: gl.constexpr):
    """Sum over the values the state after the chunk times its cotangent, by channel."""
    channels: gl.constexpr = gl.SliceLayout(1, SQUARE)
    states, dstates, k = in_rows(tiles.s, BLOCK, M), in_rows(tiles.ds, BLOCK, M), in_blocks(tiles.k.index(at), C, K)
    for block in gl.static_range(K // BLOCK):
        root = roots(weights, at, block, K, channels)[:, None]
        both = gl.zeros([BLOCK], gl.float32, channels)
        for part in range(2):
            after = held(states.index(part * (K // BLOCK) + block)) * root
            after = warpgroup_mma(k.index(block).permute((1, 0)), tiles.v.index(part), after, is_async=True)
            after = warpgroup_mma_wait(0, deps=[after])
            both += gl.sum(after * held(dstates.index(part * (K // BLOCK) + block)), 1)
        results.index(block).store(both)


@gluon.jit
def scale_pair(tiles, weights, n, scale, K: gl.constexpr):
    """Scale queries and keys of the ``n``-th chunk in place: Q̂ and K̂."""
    at = n % 2
    qs, ks, decays = in_blocks(tiles.q.index(at), C, K), in_blocks(tiles.k.index(at), C, K), in_blocks(tiles.decay.index(at), C, K)
    settled = settles(weights, at)
    if not settled:  # products with -inf would be NaN
        for block in range(K // BLOCK):
            hold(decays.index(block), gl.maximum(held(decays.index(block)), NATURAL_RESET))
        fence_async_shared()
    for block in range(K // BLOCK):
        q, k, decay = qs.index(block), ks.index(block), decays.index(block)
        zero = (n + block) >> 30  # in each step, so that left operands do not stay in registers
        up = exp2(orders(True, decay, zero))
        root = gl.where(settled, roots(weights, at, block, K, TOKENS), 1.0)
        hold(q, held(q) * (up * (scale / root)[None, :]))
        down = exp2(orders(False, decay, zero))
        root = gl.where(settled, roots(weights, at, block, K, TOKENS), 1.0)
        hold(k, held(k) * (down * (1.0 / root)[None, :]))


@gluon.jit
def add_up(tiles, results, ddecay, here, at, chunk, K: gl.constexpr):
    """Store the decay's gradient: sums of E from each token on, and of the state after the chunk times its cotangent."""
    token = gl.arange(0, C, gl.SliceLayout(1, SQUARE))[:, None] + (chunk >> 30)
    later = pick(gl.arange(0, C, TOKENS)[None, :] >= token)
    low = in_blocks(tiles.q.index(at), C, K)
    tokens = Chunk(here.head, here.time + chunk * C, here.rows - chunk * C)
    for block in range(K // BLOCK):
        dd = gl.zeros([C, BLOCK], gl.float32, SQUARE)
        dd = warpgroup_mma(later, low.index(block), dd, use_acc=False, is_async=True)
        dd = warpgroup_mma(later, tiles.dv.index(block), dd, is_async=True)
        dd = warpgroup_mma_wait(0, deps=[dd])
        save_gradients(ddecay, dd + results.index(block).load(TOKENS)[None, :], tokens, token, block, here, K)


@gluon.jit
def load_pairs(bars, sources, tiles, weights, fade, settled, marks, here, K: gl.constexpr):
    """Load queries, keys and decays of chunk after chunk, from the last, and mark those that settle; of others at most halves do."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    channel = gl.arange(0, K, layout)
    for i in range(here.count):
        chunk = here.count - 1 - i
        row = chunk * C
        stage = i % 2
        place = chunk.to(gl.int64) * here.heads
        f = gl.load(fade + place * K + channel)
        settles = gl.min(f, 0) >= gl.exp2(gl.minimum(here.rows - row, C) * LEAST)
        blocks = place * (K // BLOCK) + gl.arange(0, K // BLOCK, layout)
        gl.store(marks + blocks, gl.where(settles, C, gl.minimum(gl.load(settled + blocks), C // 2)))
        full = bars.pair_full.index(stage)
        mbarrier.wait(bars.pair_empty.index(stage), (i // 2 & 1) ^ 1)
        weights.settled.index(stage).store(gl.full([1], 1, gl.int32, layout) * settles.to(gl.int32))
        weights.fade.index(stage).store(gl.where(settles, gl.sqrt(f), f))
        mbarrier.arrive(full, count=1)
        mbarrier.expect(full, 6 * C * K)
        tma.load(sources.decay, [row, 0], full, tiles.decay.index(stage))
        tma.load(sources.q, [row, 0], full, tiles.q.index(stage))
        tma.load(sources.k, [row, 0], full, tiles.k.index(stage))


@gluon.jit
def load_values(bars, sources, tiles, here, K: gl.constexpr):
    """Load values, cotangents, P and states of chunk after chunk, from the last."""
    full = bars.value_full.index(0)
    for i in range(here.count):
        chunk = here.count - 1 - i
        row = chunk * C
        mbarrier.wait(bars.value_empty.index(0), (i & 1) ^ 1)
        mbarrier.expect(full, 8 * C * M + 4 * K * M + 2 * C * C)
        tma.load(sources.p, [row * here.heads, 0], full, tiles.p.index(0))
        for part in gl.static_range(2):
            tma.load(sources.do, [row, part * M], full, tiles.do.index(part))
            tma.load(sources.v, [row, part * M], full, tiles.v.index(part))
            tma.load(sources.s, [chunk * here.heads * K, part * M], full, tiles.s.index(part))


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "do_token", "do_head", "decay_token", "decay_head",
    "sequences", "tokens", "heads", "group", "length", "given",
])  # fmt: skip
def fused_channel(
    q, k, v, do, decay, cu, p, fade, settled, states, ends, dv, dq, dk, ddecay, dstates, marks, dinitial,
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, decay_token, decay_head,
    sequences, tokens, heads, group, scale, length, given,
    K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr,
    REGISTERS: gl.constexpr, SUMS: gl.constexpr, FEW: gl.constexpr,
):  # fmt: skip
    """``marks`` [chunks, H, K / 64] has of how many tokens the blocks of a chunk settle, as ``settled``, but all of them where the chunk is
    finished here; the cotangents after the others are written to ``dstates``.

    ``ends`` has ``given`` channels, all or none.
    """
    slot = gl.program_id(0)
    head = gl.program_id(1)
    n, first, last, index, begin_of, _ = locate(slot, cu, sequences, tokens, length, PACKED)
    if (first < last) | (index == 0):
        rows = last - first
        count = (rows + C - 1) // C
        place = (first_slot(n, begin_of, tokens, C, PACKED) + (first - begin_of) // C).to(gl.int64) * heads + head
        time = first.to(gl.int64)
        at = time * heads + head
        shared = head // group
        here = Segment(time, rows, count, head, heads)
        sources = Sources(
            described(q + time * q_token + shared * q_head, rows, q_token, K, C, K),
            described(k + time * k_token + shared * k_head, rows, k_token, K, C, K),
            described(decay + time * decay_token + head * decay_head, rows, decay_token, K, C, K),
            described(do + time * do_token + head * do_head, rows, do_token, V, C, M),
            described(v + time * v_token + head * v_head, rows, v_token, V, C, M),
            described(states + place * K * V, count * heads * K, V, V, K, M),
            described(p + place * C * C, count * heads * C, C, C, C, C),
            described(dstates + place * K * V, count * heads * K, V, V, K, M),
            described(dv + at * V, rows, heads * V, V, C, M),
            described(dq + at * K, rows, heads * K, K, C, M),
            described(dk + at * K, rows, heads * K, K, C, M),
        )
        tiles = Tiles(
            buffer(2, C, K), buffer(2, C, K), buffer(2, C, K), buffer(2, C, M), buffer(2, C, M), buffer(2, K, M), buffer(1, C, C),
            buffer(2, K, M), buffer(2, C, M), buffer(1, C, C),
        )  # fmt: skip
        weights = Weights(numbers(2, 1, gl.int32), numbers(2, K, gl.float32))
        results = numbers(K // BLOCK, BLOCK, gl.float32)  # by channel, of the state after the chunk
        bars = Bars(
            None, None, barriers(1, 1), barriers(1, 3), barriers(2, 2), barriers(2, 3), barriers(2, 1), None,
            None, barriers(1, 2), barriers(1, 3), barriers(1, 2), barriers(1, 1),
        )  # fmt: skip
        fence_async_shared()
        start = ends + (slot.to(gl.int64) * heads + head) * K * V
        end = None
        if dinitial is not None:
            end = dinitial + (n.to(gl.int64) * heads + head) * K * V
        edges = (start, given, end, index == 0, V)
        first_block = place * (K // BLOCK)
        gl.warp_specialize([
            (half, (0, bars, sources, tiles, weights, edges, here, scale, K)),
            (half, (1, bars, sources, tiles, weights, edges, here, scale, K)),
            (scale_and_sum, (bars, tiles, weights, results, ddecay, here, scale, K)),
            (load_pairs, (bars, sources, tiles, weights, fade + place * K, settled + first_block, marks + first_block, here, K)),
            (load_values, (bars, sources, tiles, here, K)),
        ], [4, 4, 1, 1], [REGISTERS, SUMS, FEW, FEW])  # fmt: skip


def options() -> dict[str, int]:
    """Registers of a program. A multiprocessor runs one program at a time."""
    return dict(num_warps=4, REGISTERS=200, SUMS=88, FEW=24, maxnreg=128)
