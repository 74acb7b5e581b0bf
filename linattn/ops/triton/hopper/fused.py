"""Backward pass of the plain rule within segments for Hopper, in Gluon: a decay per head with a gradient, 128 keys and 128 values.

One kernel scans the cotangent of the state from the last chunk to the first and forms the gradients of each chunk on the way: the
cotangent stays in registers and is never written. With P = Q Kᵀ ∘ D and G = dO Vᵀ ∘ D on and below the diagonal,

    dVᵀ = to_end (dSᵀKᵀ) + dOᵀP     dS'ᵀ = λ dSᵀ + dOᵀQ     dQ = fade (dO Sᵀ) + G K     dK = to_end (V dSᵀ) + Gᵀ Q

Two warpgroups share the work of a chunk. Each forms one of the matrices P and G, which both read, scans the cotangent of half of the
values, transposed as in backward.py, of which it leaves a rounded copy in shared memory, and computes the gradients of q and k in half
of the channels. One warp loads ahead, one turns decays into weights, and two sum the gradient of the decay. The gradients of q and k
leave from the memory of q and k, of which there are two stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.common import M, add, barriers, buffer, described, first_slot, give_back, locate, numbers, weight, whole
from linattn.ops.triton.hopper.names import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from linattn.ops.triton.hopper.operands import C, in_blocks, in_rows
from linattn.ops.triton.tiles import LOG2E


class Shape(NamedTuple):
    """Constants."""

    K: Any
    BITS: Any


class Bars(NamedTuple):
    """Barriers."""

    value_full: Any  # dO, v and S
    value_empty: Any
    pair_full: Any  # q and k, whose memory their gradients take
    pair_empty: Any
    decay_full: Any
    decay_empty: Any
    paired: Any  # the rounded cotangent and the matrices of pairs are in shared memory
    scanned: Any  # and the scan has read q and k
    used: Any  # all of them have been read
    sum_full: Any
    sum_empty: Any


class Tiles(NamedTuple):
    """Shared memory, values in two halves."""

    q: Any
    k: Any
    do: Any
    v: Any
    s: Any
    ds: Any
    dv: Any
    pairs: Any  # P and G


class Sources(NamedTuple):
    """Tensors in global memory that TMA reads and writes."""

    q: Any
    k: Any
    do: Any
    v: Any
    s: Any
    dv: Any
    dq: Any
    dk: Any


class Weights(NamedTuple):
    """Decays of a chunk: whole steps up to each token, and factors up to there, from there on, and of the whole chunk."""

    steps: Any
    to_here: Any
    to_end: Any
    fade: Any


class Segment(NamedTuple):
    """Location of a segment of a head."""

    time: Any
    rows: Any
    count: Any  # chunks
    head: Any
    heads: Any


@gluon.jit
def load(bars, sources, tiles, here, shape):
    """Load the tiles of chunk after chunk, from the last, as soon as their memory is free."""
    K: gl.constexpr = shape.K
    V: gl.constexpr = 2 * M
    for i in range(here.count):
        chunk = here.count - 1 - i
        row = chunk * C
        phase = (i & 1) ^ 1
        stage = i % 2
        full = bars.pair_full.index(stage)
        mbarrier.wait(bars.pair_empty.index(stage), (i // 2 & 1) ^ 1)
        mbarrier.expect(full, 4 * C * K)
        tma.load(sources.k, [row, 0], full, tiles.k.index(stage))
        tma.load(sources.q, [row, 0], full, tiles.q.index(stage))
        full = bars.value_full.index(0)
        mbarrier.wait(bars.value_empty.index(0), phase)
        mbarrier.expect(full, 4 * C * V + 2 * K * V)
        for part in gl.static_range(2):
            tma.load(sources.do, [row, part * M], full, tiles.do.index(part))
        for part in gl.static_range(2):
            tma.load(sources.v, [row, part * M], full, tiles.v.index(part))
            tma.load(sources.s, [chunk * here.heads * K, part * M], full, tiles.s.index(part))


@gluon.jit
def weigh(bars, weights, decay, here, shape):
    """Turn decays into weights, chunk after chunk from the last."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    base, step = decay
    for i in range(here.count):
        token = (here.count - 1 - i) * C + gl.arange(0, C, layout)
        d = gl.load(base + token.to(gl.int64) * step, mask=token < here.rows, other=0.0).to(gl.float32)
        steps = whole(d, shape.BITS)
        sums = gl.associative_scan(steps, 0, add)
        at = i % 2
        mbarrier.wait(bars.decay_empty.index(at), (i // 2 & 1) ^ 1)
        weights.steps.index(at).store(sums)
        weights.to_here.index(at).store(weight(sums, shape.BITS))
        weights.to_end.index(at).store(weight(gl.sum(steps, 0) - sums, shape.BITS))
        weights.fade.index(at).store(gl.full([1], gl.exp2(gl.sum(d, 0) * LOG2E), gl.float32, layout))
        mbarrier.arrive(bars.decay_full.index(at), count=1)


@gluon.jit
def add_up(bars, tiles, results, decay, ddecay, here, shape):
    """Sum the gradient of the decay: of reads across each token, of writes past it, and of the state that passes the whole chunk."""
    square: gl.constexpr = gl.BlockedLayout([1, C // 2], [16, 2], [2, 1], [1, 0])
    layout: gl.constexpr = gl.SliceLayout(1, square)
    others: gl.constexpr = gl.SliceLayout(0, square)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    SLICE: gl.constexpr = 16
    base, step = decay
    for i in range(here.count):
        token = (here.count - 1 - i) * C + gl.arange(0, C, layout)
        inside = token < here.rows
        d = gl.load(base + token.to(gl.int64) * step, mask=inside, other=0.0).to(gl.float32)
        faded = gl.exp2(gl.sum(d, 0) * LOG2E)
        mbarrier.wait(bars.value_full.index(0), i & 1)
        mbarrier.wait(bars.scanned.index(0), i & 1)
        both = gl.zeros([SLICE, M], gl.float32, wide)
        states, dstates = in_rows(tiles.s, SLICE, M), in_rows(tiles.ds, SLICE, M)
        for n in range(2 * shape.K // SLICE):
            both += states.index(n).load(wide).to(gl.float32) * dstates.index(n).load(wide).to(gl.float32)
        give_back(bars.value_empty.index(0))
        mbarrier.arrive(bars.used.index(0), count=1)
        past = faded * gl.sum(gl.sum(both, 1), 0)
        mbarrier.wait(bars.sum_full.index(0), i & 1)
        crossing = results.index(0).load(others) + results.index(1).load(others)
        crossing -= results.index(2).load(others)
        sending = results.index(3).load(others) + results.index(4).load(others)
        give_back(bars.sum_empty.index(0))
        later = gl.arange(0, C, others)[None, :] >= gl.arange(0, C, layout)[:, None]
        dd = gl.sum(gl.where(later, crossing[None, :], sending[None, :]), 1) + past
        to = ddecay + (here.time + token) * here.heads + here.head
        gl.store(to, dd.to(ddecay.dtype.element_ty), mask=inside)


@gluon.jit
def over_values(left, right, at, to):
    """Start to sum the products of both halves of the values, which begin ``at`` a tile of ``left`` and ``right``."""
    to = warpgroup_mma(left.index(at), right.index(at).permute((1, 0)), to, use_acc=False, is_async=True)
    return warpgroup_mma(left.index(at + 1), right.index(at + 1).permute((1, 0)), to, is_async=True)


@gluon.jit
def over_states(left, states, at, part: gl.constexpr, to):
    """Start to sum the products of both halves of the values with ``part`` of the channels of ``states``."""
    to = warpgroup_mma(left.index(at), states.index(at).slice(part * M, M, 0).permute((1, 0)), to, use_acc=False, is_async=True)
    return warpgroup_mma(left.index(at + 1), states.index(at + 1).slice(part * M, M, 0).permute((1, 0)), to, is_async=True)


@gluon.jit
def half(part: gl.constexpr, bars, sources, tiles, weights, results, ends, here, scale, shape):
    """Scan the cotangent of half of the values, and compute one matrix of pairs and the gradients of half of the channels."""
    K: gl.constexpr = shape.K
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # [M or C, C or M]
    along_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left_of_c: gl.constexpr = gl.DotOperandLayout(0, square, 2)
    left_of_k: gl.constexpr = gl.DotOperandLayout(0, along_k, 2)
    rows: gl.constexpr = gl.SliceLayout(1, square)
    tokens: gl.constexpr = gl.SliceLayout(0, square)
    start, end, finishes, V = ends
    nothing = gl.zeros([C, C], gl.float32, square)
    token = gl.arange(0, C, rows)[:, None]
    other = gl.arange(0, C, tokens)[None, :]
    channels = gl.arange(0, K, gl.SliceLayout(0, along_k))
    columns = part * M + gl.arange(0, M, gl.SliceLayout(1, along_k))
    if start is not None:
        s = gl.load(start + channels[None, :] * V + columns[:, None])
    else:
        s = gl.zeros([M, K], gl.float32, along_k)

    for i in range(here.count):
        chunk = here.count - 1 - i
        phase = i & 1
        at = i % 2
        zero = chunk >> 30  # recomputed in each step, so that what follows from it does not stay in registers
        q, k = tiles.q.index(at), tiles.k.index(at)

        # Pairs of tokens: P, or G.
        mbarrier.wait(bars.pair_full.index(at), i // 2 & 1)
        met = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        rounded = s.to(gl.bfloat16)
        dv = warpgroup_mma(gl.convert_layout(rounded, left_of_c), k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(bars.value_full.index(0), phase)
        if part:
            pairs = over_values(tiles.do, tiles.v, zero, nothing)
        mbarrier.wait(bars.used.index(0), phase ^ 1)
        tiles.ds.index(zero + part).permute((1, 0)).store(rounded)
        mbarrier.wait(bars.decay_full.index(at), i // 2 & 1)
        steps = weights.steps.index(at).load(rows)[:, None] - weights.steps.index(at).load(tokens)[None, :]
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
        do = tiles.do.index(zero + part).permute((1, 0)).load(square)
        dv = dv * weights.to_end.index(at).load(tokens)[None, :]
        reads = (do.to(gl.float32) * (weights.to_here.index(at).load(tokens) * scale)[None, :]).to(gl.bfloat16)
        s = s * weights.fade.index(at).load(gl.SliceLayout(0, along_k))[None, :]
        s = warpgroup_mma(gl.convert_layout(reads, left_of_k), q, s, is_async=True)
        if part:
            met = gl.where(token > other, pairs * met, 0.0)
            crossing = gl.sum(met, 1)
            mbarrier.wait(bars.sum_empty.index(0), phase ^ 1)
            results.index(2).store(gl.sum(met, 0))
        else:
            mbarrier.wait(bars.sum_empty.index(0), phase ^ 1)

        # The cotangents of the values.
        mbarrier.wait(bars.paired.index(0), phase)
        dv = warpgroup_mma(gl.convert_layout(do, left_of_c), tiles.pairs.index(zero), dv, is_async=True)
        s, dv = warpgroup_mma_wait(0, deps=[s, dv])
        mbarrier.arrive(bars.scanned.index(0), count=1)  # and has read the other's half of q and k
        dq = over_states(tiles.do, tiles.s, zero, part, nothing)
        dk = over_states(tiles.v, tiles.ds, zero, part, nothing)
        tma.store_wait(0)
        mbarrier.arrive(bars.pair_empty.index(1 - at), count=1, pred=i > 0)  # gradients have left the memory of q and k
        tiles.dv.index(zero + part).permute((1, 0)).store(dv.to(gl.bfloat16))
        fence_async_shared()
        tma.store(sources.dv, [chunk * C, part * M], tiles.dv.index(zero + part))

        # Gradients of half of the channels.
        dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
        give_back(bars.value_empty.index(0))
        from_start = weights.to_here.index(at).load(rows)[:, None]
        to_end = weights.to_end.index(at).load(rows)[:, None]
        give_back(bars.decay_empty.index(at))
        dq = dq * (from_start * scale)
        dk = dk * to_end
        q_half, k_half = in_blocks(q, C, K).index(part), in_blocks(k, C, K).index(part)
        reading = gl.sum(q_half.load(square).to(gl.float32) * dq, 1)
        results.index(part).store(crossing + reading if part else reading)
        results.index(3 + part).store(gl.sum(k_half.load(square).to(gl.float32) * dk, 1))
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
        V = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [V], gl.int32, False, 1)  # addresses anew, or they spill
        gl.store(end + channels[None, :] * V + columns[:, None], s)


@gluon.jit(do_not_specialize=[
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "do_token", "do_head", "decay_token", "decay_head",
    "sequences", "tokens", "heads", "group", "length",
])  # fmt: skip
def fused(
    q, k, v, do, decay, cu, states, ends, dv, dq, dk, ddecay, dinitial,
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, decay_token, decay_head,
    sequences, tokens, heads, group, scale, length,
    K: gl.constexpr, V: gl.constexpr, PACKED: gl.constexpr, BITS: gl.constexpr, START: gl.constexpr, REGISTERS: gl.constexpr,
    FEW: gl.constexpr,
):  # fmt: skip
    """One program per segment and head."""
    slot = gl.program_id(0)
    head = gl.program_id(1)
    n, first, last, index, begin, _ = locate(slot, cu, sequences, tokens, length, PACKED)
    if (first < last) | (index == 0):
        rows = last - first
        count = (rows + C - 1) // C
        place = (first_slot(n, begin, tokens, C, PACKED) + (first - begin) // C).to(gl.int64) * heads + head
        time = first.to(gl.int64)
        at = time * heads + head
        shared = head // group
        here = Segment(time, rows, count, head, heads)
        sources = Sources(
            described(q + time * q_token + shared * q_head, rows, q_token, K, C, K),
            described(k + time * k_token + shared * k_head, rows, k_token, K, C, K),
            described(do + time * do_token + head * do_head, rows, do_token, V, C, M),
            described(v + time * v_token + head * v_head, rows, v_token, V, C, M),
            described(states + place * K * V, count * heads * K, V, V, K, M),
            described(dv + at * V, rows, heads * V, V, C, M),
            described(dq + at * K, rows, heads * K, K, C, M),
            described(dk + at * K, rows, heads * K, K, C, M),
        )
        tiles = Tiles(
            buffer(2, C, K), buffer(2, C, K), buffer(2, C, M), buffer(2, C, M), buffer(2, K, M), buffer(2, K, M), buffer(2, C, M),
            buffer(2, C, C),
        )  # fmt: skip
        weights = Weights(numbers(2, C, gl.int32), numbers(2, C, gl.float32), numbers(2, C, gl.float32), numbers(2, 1, gl.float32))
        results = numbers(5, C, gl.float32)
        bars = Bars(
            barriers(1, 1), barriers(1, 3), barriers(2, 1), barriers(2, 2), barriers(2, 1), barriers(2, 2), barriers(1, 2), barriers(1, 2),
            barriers(1, 3), barriers(1, 2), barriers(1, 1),
        )  # fmt: skip
        fence_async_shared()
        of_decay = (decay + time * decay_token + head * decay_head, decay_token)
        start, end = None, None
        if START:
            start = ends + (slot.to(gl.int64) * heads + head) * K * V
        if dinitial is not None:
            end = dinitial + (n.to(gl.int64) * heads + head) * K * V
        edges = (start, end, index == 0, V)
        gl.warp_specialize([
            (half, (0, bars, sources, tiles, weights, results, edges, here, scale, Shape(K, BITS))),
            (half, (1, bars, sources, tiles, weights, results, edges, here, scale, Shape(K, BITS))),
            (add_up, (bars, tiles, results, of_decay, ddecay, here, Shape(K, BITS))),
            (load, (bars, sources, tiles, here, Shape(K, BITS))),
            (weigh, (bars, weights, of_decay, here, Shape(K, BITS))),
        ], [4, 2, 1, 1], [REGISTERS, FEW, FEW, FEW])  # fmt: skip


def options() -> dict[str, int]:
    """Registers of a program. A multiprocessor runs one program at a time."""
    return dict(num_warps=4, REGISTERS=216, FEW=72, maxnreg=168)
