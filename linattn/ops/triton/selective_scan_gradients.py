"""Kernels of the selective scan's gradients, in the segments and tiles of selective_scan_kernels.py, from the last token to the first.

Sums over channels (the gradients of B and C) are formed in each warp, and ``gather`` adds the warps in order, for
deterministic results.
"""

import triton
import triton.language as tl

from linattn.ops.triton.recurrences import _exp2
from linattn.ops.triton.selective_scan_kernels import TOGETHER, _ahead, _any, _given, _marks, _numbers, _place, _place_of, _rows

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _fold(one, two, lane, bit: tl.constexpr):
    """Sums over pairs of lanes: of ``one`` in lanes without the ``bit`` in their index, of ``two`` in the others."""
    upper = (lane & bit) != 0
    return tl.where(upper, two, one) + tl.gather(tl.where(upper, one, two), lane ^ bit, 0)


@triton.jit
def _over_lanes(values, lane, COUNT: tl.constexpr):
    """Sum COUNT vectors [32], a power of two, over lanes: lane l gets the sum of vector l % COUNT, at a fifth of the cost of COUNT sums."""
    for level in tl.static_range(5):
        if COUNT >> level > 1:
            folded = ()  # type: tuple
            for j in tl.static_range(COUNT >> (level + 1)):
                folded = folded + (_fold(values[2 * j], values[2 * j + 1], lane, 1 << level),)
            values = folded
        else:
            values = (values[0] + tl.gather(values[0], lane ^ (1 << level), 0),)
    return values[0]


@triton.jit
def _own(values, K: tl.constexpr):
    """Sum [32 K] over the channels of each lane: [32]."""
    return tl.sum(tl.reshape(values, [32, K]), 1)


@triton.jit
def _back(common, start, stop, initial, d_final, d_initial, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """Run back through a tile with one state: gradients before the tile and of A, sums for the tokens, and sums over channels."""
    state, g, of_fade, of_written, of_steps, steps, fade, written, into, outof, d_out, d, n, real = common
    kept_parts, states, of_outof = (), (), ()  # type: tuple, tuple, tuple
    for i in tl.static_range(C):
        if start is not None:
            state = tl.where(start[i] > 0, _given(initial, start[i], d, n, real, D, N), state)
        kept_part = _exp2(steps[i] * fade)
        kept_parts, states = kept_parts + (kept_part,), states + (state,)
        state = kept_part * state + written[i] * into[i]
        of_outof = of_outof + (_own(state * d_out[i], K),)
    of_into, sums_written, sums_steps = (), (), ()  # type: tuple, tuple, tuple
    for i in tl.static_range(C - 1, -1, -1):
        if start is not None:
            g = tl.where(stop[i] > 0, _given(d_final, stop[i], d, n, real, D, N), g)
        g += d_out[i] * outof[i]
        sums_written = (of_written[i] + g * into[i],) + sums_written
        of_into = (_own(g * written[i], K),) + of_into
        g = kept_parts[i] * g
        of_log = g * states[i]
        sums_steps = (of_steps[i] + of_log * fade,) + sums_steps
        of_fade += of_log * steps[i]
        if (start is not None) and (d_initial is not None):
            tl.store(d_initial + ((start[i] - 1).to(tl.int64) * D + d) * N + n, g, mask=(start[i] > 0) & real)
    return g, of_fade, sums_written, sums_steps, of_into + of_outof


@triton.jit(do_not_specialize=["T", "padded", "tiles", "span", "segments", "batch"])
def backward(
    x, dt, a, both, skip, initial, d_y, d_final, starts, stops, kept, carried,
    d_x, d_dt, d_a, d_both, d_skip, d_initial, T, padded, tiles, span, segments, batch,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute the gradients; ``kept`` [B, tiles, N, D] are the states before tiles, ``carried`` [B, segments, N, D] entering gradients.

    Those of A and of D come in parts of segments, d_a [B, segments, N, D] and d_skip [B, segments, D]; those of B and C in
    parts of channels, ``d_both`` [blocks, ..] like ``both``.
    """
    block, d, real, s, b = _place(segments, D, K)
    lane = tl.arange(0, 32)
    first = s * span
    last = tl.minimum(first + span, tiles)
    passing, of_passing = tl.zeros([32 * K], tl.float32), tl.zeros([32 * K], tl.float32)
    if skip is not None:
        passing = tl.load(skip + d, mask=real, other=0.0).to(tl.float32)
    mine = (b * segments + s) * N * D + d
    for j in range(first, last):
        tile = first + last - 1 - j
        t = tile * C
        corner = (b * T + t) * D + d
        steps = _rows(dt, corner, t, T, real, D, C)
        values = _rows(x, corner, t, T, real, D, C)
        d_out = _rows(d_y, corner, t, T, real, D, C)
        ahead = tl.maximum(tile - 1, first)
        _ahead(dt, block * (32 * K), b * T + ahead * C, b * T + T, D, C, K)
        _ahead(x, block * (32 * K), b * T + ahead * C, b * T + T, D, C, K)
        _ahead(d_y, block * (32 * K), b * T + ahead * C, b * T + T, D, C, K)
        _ahead(kept, block * (32 * K), (b * tiles + ahead) * N, (b * tiles + ahead + 1) * N, D, N, K)
        written, of_written, of_steps = (), (), ()  # type: tuple, tuple, tuple
        for i in tl.static_range(C):
            written = written + (steps[i] * values[i],)
            of_written = of_written + (tl.zeros([32 * K], tl.float32),)
            of_steps = of_steps + (tl.zeros([32 * K], tl.float32),)
        if starts is not None:
            start, stop = _marks(starts, t, T, C), _marks(stops, t, T, C)
            marked = _any(start, stop, C)
        before = kept + (b * tiles + tile) * N * D + d
        numbers = both + _place_of(b, t, padded, N)
        parts = d_both + _place_of(block * batch + b, t, padded, N) + (lane // C % 2) * (N * TOGETHER) + lane % C
        later_fade = tl.load(a + d, mask=real, other=0.0)
        later_state = tl.load(before, mask=real, other=0.0)
        later_g = tl.load(carried + mine, mask=real, other=0.0)
        for n in range(N):
            fade, state, g, more = later_fade, later_state, later_g, (n + 1 < N) & real
            later_fade = tl.load(a + (n + 1) * D + d, mask=more, other=0.0)
            later_state = tl.load(before + (n + 1) * D, mask=more, other=0.0)
            later_g = tl.load(carried + mine + (n + 1) * D, mask=more, other=0.0)
            of_fade = tl.load(d_a + mine + n * D, mask=(j > first) & real, other=0.0)
            into, outof = _numbers(numbers + n * TOGETHER, C), _numbers(numbers + (N + n) * TOGETHER, C)
            common = (state, g, of_fade, of_written, of_steps, steps, fade, written, into, outof, d_out, d, n, real)
            if starts is None:
                g, of_fade, of_written, of_steps, sums = _back(common, None, None, None, None, None, D, N, C, K)
            elif marked:
                g, of_fade, of_written, of_steps, sums = _back(common, start, stop, initial, d_final, d_initial, D, N, C, K)
            else:
                g, of_fade, of_written, of_steps, sums = _back(common, None, None, None, None, None, D, N, C, K)
            tl.store(carried + mine + n * D, g, mask=real)
            tl.store(d_a + mine + n * D, of_fade, mask=real)
            tl.store(parts + n * TOGETHER, _over_lanes(sums, lane, 2 * C), mask=lane < 2 * C)
        values = _rows(x, corner, t, T, real, D, C)  # loaded again, to save registers
        for i in tl.static_range(C):
            there = (t + i < T) & real
            tl.store(d_x + corner + i * D, (of_written[i] * steps[i] + passing * d_out[i]).to(d_x.dtype.element_ty), mask=there)
            tl.store(d_dt + corner + i * D, (of_written[i] * values[i] + of_steps[i] * LN2).to(d_dt.dtype.element_ty), mask=there)
            of_passing += values[i] * d_out[i]
    if skip is not None:
        tl.store(d_skip + (b * segments + s) * D + d, of_passing, mask=real)
    if (starts is None) and (d_initial is not None):
        if s == 0:
            for n in range(N):
                tl.store(d_initial + (b * D + d) * N + n, tl.load(carried + mine + n * D, mask=real, other=0.0), mask=real)


@triton.jit(do_not_specialize=["T", "padded", "blocks"])
def gather(d_both, d_b, d_c, T, padded, blocks, N: tl.constexpr, NB: tl.constexpr, TB: tl.constexpr):
    """Gradients of B and C [B, T, N] from their parts [blocks, ..], added one after the other."""
    n, t = tl.arange(0, NB)[:, None], tl.program_id(0) * TB + tl.arange(0, TB)[None, :]
    row, which = (tl.program_id(1) // 2).to(tl.int64), tl.program_id(1) % 2
    there = (n < N) & (t < T)
    total = tl.zeros([NB, TB], tl.float32)
    size = tl.num_programs(1).to(tl.int64) * N * padded
    part = d_both + _place_of(row, t, padded, N) + (which * N + n) * TOGETHER
    for _ in range(blocks):
        total += tl.load(part, mask=there, other=0.0)
        part += size
    to = (row * T + t) * N + n
    if which == 0:
        tl.store(d_b + to, total.to(d_b.dtype.element_ty), mask=there)
    else:
        tl.store(d_c + to, total.to(d_c.dtype.element_ty), mask=there)
