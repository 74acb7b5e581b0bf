"""Parts of the kernel that scans the cotangent of the state and computes the gradients of chunks: see fused.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from linattn.ops.triton.hopper import tma
from linattn.ops.triton.hopper.common import M, add, give_back, weight, whole
from linattn.ops.triton.hopper.names import mbarrier, warpgroup_mma
from linattn.ops.triton.hopper.operands import C, in_rows
from linattn.ops.triton.hopper.sizes import WIDEST
from linattn.ops.triton.tiles import HEAD, LOG2E

SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # [M or C, C or M] in accumulators
ALONG_K = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDEST, 16]))  # [M, K]
LEFT_OF_C = gl.constexpr(gl.DotOperandLayout(0, SQUARE.value, 2))
LEFT_OF_K = gl.constexpr(gl.DotOperandLayout(0, ALONG_K.value, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, SQUARE.value))
TOKENS = gl.constexpr(gl.SliceLayout(0, SQUARE.value))


class Shape(NamedTuple):
    """Constants."""

    K: Any
    DECAY: Any
    BITS: Any
    SUMS: Any  # True if the decay's gradient is computed
    DELTA: Any


class Bars(NamedTuple):
    """Barriers."""

    square_full: Any  # P and B
    square_empty: Any
    value_full: Any  # dO, E and S
    value_empty: Any
    pair_full: Any  # q and k, aliased by their gradients
    pair_empty: Any
    decay_full: Any
    decay_empty: Any
    scanned: Any  # the cotangents of the state and of the values are in shared memory
    paired: Any  # the matrices of pairs are in shared memory
    used: Any  # all of them have been read
    sum_full: Any
    sum_empty: Any


class Tiles(NamedTuple):
    """Shared memory, values in two halves."""

    p: Any
    b: Any
    q: Any
    k: Any
    do: Any
    e: Any
    s: Any
    ds: Any
    dv: Any
    pairs: Any  # G and N


class Sources(NamedTuple):
    """Tensors in global memory that TMA reads and writes."""

    p: Any
    b: Any
    q: Any
    k: Any
    do: Any
    e: Any
    s: Any
    late: Any  # later keys of S if separate
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
def begin(part: gl.constexpr, start, V, K: gl.constexpr):
    """Zeros [C, C], token indices along both sides, and the cotangent of half of the values after the last chunk.

    Also the indices of its channels and columns. It is loaded from ``start`` [K, V], or 0 without it.
    """
    nothing = gl.zeros([C, C], gl.float32, SQUARE)
    token = gl.arange(0, C, ROWS)[:, None]
    other = gl.arange(0, C, TOKENS)[None, :]
    channels = gl.arange(0, K, gl.SliceLayout(0, ALONG_K))
    columns = part * M + gl.arange(0, M, gl.SliceLayout(1, ALONG_K))
    if start is not None:
        s = gl.load(start + channels[None, :] * V + columns[:, None])
    else:
        s = gl.zeros([M, K], gl.float32, ALONG_K)
    return nothing, token, other, s, channels, columns


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
        if shape.DELTA:
            full = bars.square_full.index(0)
            mbarrier.wait(bars.square_empty.index(0), phase)
            mbarrier.expect(full, 4 * C * C)
            tma.load(sources.p, [row, 0], full, tiles.p.index(0))
            tma.load(sources.b, [row, 0], full, tiles.b.index(0))
        full = bars.value_full.index(0)
        mbarrier.wait(bars.value_empty.index(0), phase)
        mbarrier.expect(full, 4 * C * V + 2 * K * V)
        for part in gl.static_range(2):
            tma.load(sources.do, [row, part * M], full, tiles.do.index(part))
        for part in gl.static_range(2):
            tma.load(sources.e, [row, part * M], full, tiles.e.index(part))
            if sources.late is None:
                tma.load(sources.s, [chunk * here.heads * K, part * M], full, tiles.s.index(part))
            else:
                tma.load(sources.s, [row, part * M], full, in_rows(tiles.s, C, M).index(2 * part))
                tma.load(sources.late, [row, part * M], full, in_rows(tiles.s, C, M).index(2 * part + 1))


@gluon.jit
def weigh(bars, weights, decay, here, shape):
    """Turn decays into weights, chunk after chunk from the last."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    base, step = decay
    if shape.DECAY == HEAD:
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
    square: gl.constexpr = gl.BlockedLayout([1, C // 4], [8, 4], [2, 1], [1, 0])
    layout: gl.constexpr = gl.SliceLayout(1, square)
    others: gl.constexpr = gl.SliceLayout(0, square)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    SLICE: gl.constexpr = 16
    base, step = decay
    if shape.SUMS:
        for i in range(here.count):
            token = (here.count - 1 - i) * C + gl.arange(0, C, layout)
            inside = token < here.rows
            d = gl.load(base + token.to(gl.int64) * step, mask=inside, other=0.0).to(gl.float32)
            faded = gl.exp2(gl.sum(d, 0) * LOG2E)
            if shape.DELTA:
                mbarrier.wait(bars.sum_full.index(0), i & 1)
                past = faded * gl.sum(results.index(6).load(others) + results.index(7).load(others), 0)
                crossing = results.index(0).load(others) + results.index(1).load(others)
            else:
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
                crossing = results.index(0).load(others) + results.index(1).load(others) - results.index(3).load(others)
            sending = results.index(4).load(others) + results.index(5).load(others)
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
