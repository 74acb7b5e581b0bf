"""Kernels of the selective scan's gradients, in the segments and tiles of selective_scan_kernels.py, from the last token to the first.

The states before the tiles of a group are computed again from the one before the group that forward has saved. Sums over channels
(the gradients of B and C) are formed in each program, and ``gather`` adds the programs in order, for deterministic results.
"""

import triton
import triton.language as tl

from linattn.ops.triton.recurrences import _exp2
from linattn.ops.triton.selective_scan_kernels import (
    TOGETHER,
    _ahead,
    _any,
    _ends,
    _given,
    _marks,
    _numbers,
    _place,
    _place_of,
    _rows,
    _save,
    _states,
)

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _fold(one, two, lane, bit: tl.constexpr):
    """Sums over pairs of lanes: of ``one`` in lanes without the ``bit`` in their index, of ``two`` in the others."""
    upper = (lane & bit) != 0
    return tl.where(upper, two, one) + tl.gather(tl.where(upper, one, two), lane ^ bit, 1)


@triton.jit
def _over_lanes(values, lane, COUNT: tl.constexpr):
    """Sum COUNT tensors [warps, 32], a power of two, over lanes and warps: lane l gets the sum of tensor l % COUNT.

    This costs a fifth of COUNT sums over lanes.
    """
    for level in tl.static_range(5):
        if COUNT >> level > 1:
            folded = ()  # type: tuple
            for j in tl.static_range(COUNT >> (level + 1)):
                folded = folded + (_fold(values[2 * j], values[2 * j + 1], lane, 1 << level),)
            values = folded
        else:
            values = (values[0] + tl.gather(values[0], lane ^ (1 << level), 1),)
    return tl.sum(values[0], 0)


@triton.jit
def _own(values, W: tl.constexpr):
    """Sum over the channels of each lane of W warps: [W, 32]."""
    return tl.sum(tl.reshape(values, [W, 32, values.shape[0] // (32 * W)]), 2)


@triton.jit
def _back(common, start, stop, initial, d_final, d_initial, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Run back through a tile with one state: gradients before the tile and of A, sums for the tokens, and sums over channels."""
    state, g, of_fade, of_written, of_steps, steps, fade, written, into, outof, d_out, d, n, real = common
    kept_parts, states, of_outof = (), (), ()  # type: tuple, tuple, tuple
    for i in tl.static_range(C):
        if start is not None:
            state = tl.where(start[i] > 0, _given(initial, start[i], d, n, real, D, N), state)
        kept_part = _exp2(steps[i] * fade)
        kept_parts, states = kept_parts + (kept_part,), states + (state,)
        state = kept_part * state + written[i] * into[i]
        of_outof = of_outof + (_own(state * d_out[i], W),)
    of_into, sums_written, sums_steps = (), (), ()  # type: tuple, tuple, tuple
    for i in tl.static_range(C - 1, -1, -1):
        if start is not None:
            g = tl.where(stop[i] > 0, _given(d_final, stop[i], d, n, real, D, N), g)
        g += d_out[i] * outof[i]
        sums_written = (of_written[i] + g * into[i],) + sums_written
        of_into = (_own(g * written[i], W),) + of_into
        g = kept_parts[i] * g
        of_log = g * states[i]
        sums_steps = (of_steps[i] + of_log * fade,) + sums_steps
        of_fade += of_log * steps[i]
        if (start is not None) and (d_initial is not None):
            tl.store(d_initial + ((start[i] - 1).to(tl.int64) * D + d) * N + n, g, mask=(start[i] > 0) & real)
    return g, of_fade, sums_written, sums_steps, of_into + of_outof


@triton.jit
def _recomputed(
    x, dt, a, both, initial, starts, kept, within, low, high, d, real, b, T, padded,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, DB: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Compute the states before the tiles of a group [low, high) but its first from those in ``kept``: ``within`` [tiles, N, DB]."""
    for m in range(0, N, H):
        fades, states = _states(a + m * D + d, real, D, H), _states(kept + m * D, real, D, H)
        for tile in range(low, high - 1):
            t = tile * C
            corner = (b * T + t) * D + d
            steps = _rows(dt, corner, t, T, real, D, C)
            values = _rows(x, corner, t, T, real, D, C)
            written = ()  # type: tuple
            for i in tl.static_range(C):
                written = written + (steps[i] * values[i],)
            numbers = both + _place_of(b, t, padded, N) + m * TOGETHER
            if starts is None:
                states = _ends(states, steps, fades, written, numbers, None, None, d, m, real, D, N, C, H, False)
            else:
                start = _marks(starts, t, T, C)
                if _any(start, start, C):
                    states = _ends(states, steps, fades, written, numbers, start, initial, d, m, real, D, N, C, H, False)
                else:
                    states = _ends(states, steps, fades, written, numbers, None, None, d, m, real, D, N, C, H, False)
            _save(within + ((tile - low) * N + m) * DB + tl.arange(0, DB), states, real, DB, H)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "padded", "tiles", "span", "segments", "batch"])
def backward(
    x, dt, a, both, skip, initial, d_y, d_final, starts, stops, kept, within, carried,
    d_x, d_dt, d_a, d_both, d_skip, d_initial, T, padded, tiles, span, segments, batch,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, DB: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute the gradients; ``carried`` [B, segments, N, D] are the gradients of states that enter the segments.

    ``kept`` [B, groups, N, D] are the states before each GROUP of tiles; ``within`` is memory of each program for the others.
    The gradients of A and of D come in parts of segments, d_a [B, segments, N, D] and d_skip [B, segments, D]; those of B and C in
    parts of programs, ``d_both`` [blocks, ..] like ``both``.
    """
    block, d, real, s, b = _place(segments, D, DB)
    lane, lanes = tl.arange(0, 32), tl.broadcast_to(tl.arange(0, 32)[None, :], [W, 32])
    first = s * span
    last = tl.minimum(first + span, tiles)
    groups = (tiles + GROUP - 1) // GROUP
    passing, of_passing = tl.zeros([DB], tl.float32), tl.zeros([DB], tl.float32)
    if skip is not None:
        passing = tl.load(skip + d, mask=real, other=0.0).to(tl.float32)
    mine = (b * segments + s) * N * D + d
    within += tl.program_id(0).to(tl.int64) * ((GROUP - 1) * N * DB)
    low = last  # of the group at hand
    for j in range(first, last):
        tile = first + last - 1 - j
        if tile < low:
            high = low
            low = tile // GROUP * GROUP
            before_group = kept + (b * groups + low // GROUP) * N * D + d
            _recomputed(x, dt, a, both, initial, starts, before_group, within, low, high, d, real, b, T, padded, D, N, C, DB, H)
        t = tile * C
        corner = (b * T + t) * D + d
        steps = _rows(dt, corner, t, T, real, D, C)
        values = _rows(x, corner, t, T, real, D, C)
        d_out = _rows(d_y, corner, t, T, real, D, C)
        ahead = tl.maximum(tile - 1, first)
        _ahead(dt, block * DB, b * T + ahead * C, b * T + T, D, C, DB)
        _ahead(x, block * DB, b * T + ahead * C, b * T + T, D, C, DB)
        _ahead(d_y, block * DB, b * T + ahead * C, b * T + T, D, C, DB)
        written, of_written, of_steps = (), (), ()  # type: tuple, tuple, tuple
        for i in tl.static_range(C):
            written = written + (steps[i] * values[i],)
            of_written = of_written + (tl.zeros([DB], tl.float32),)
            of_steps = of_steps + (tl.zeros([DB], tl.float32),)
        if starts is not None:
            start, stop = _marks(starts, t, T, C), _marks(stops, t, T, C)
            marked = _any(start, stop, C)
        saved = kept + (b * groups + tile // GROUP) * N * D + d
        before = tl.where(tile == low, saved, within + (tile - low - 1) * N * DB + tl.arange(0, DB))
        apart = tl.where(tile == low, D, DB)  # between two states
        numbers = both + _place_of(b, t, padded, N)
        parts = d_both + _place_of(block * batch + b, t, padded, N) + (lane // C % 2) * (N * TOGETHER) + lane % C
        later_fade = tl.load(a + d, mask=real, other=0.0)
        later_state = tl.load(before, mask=real, other=0.0)
        later_g = tl.load(carried + mine, mask=real, other=0.0)
        later_sum = tl.load(d_a + mine, mask=(j > first) & real, other=0.0)
        later_into, later_outof = _numbers(numbers, C), _numbers(numbers + N * TOGETHER, C)
        for n in range(N):
            fade, state, g, more = later_fade, later_state, later_g, (n + 1 < N) & real
            later_fade = tl.load(a + (n + 1) * D + d, mask=more, other=0.0)
            later_state = tl.load(before + (n + 1) * apart, mask=more, other=0.0)
            later_g = tl.load(carried + mine + (n + 1) * D, mask=more, other=0.0)
            of_fade = later_sum
            later_sum = tl.load(d_a + mine + (n + 1) * D, mask=(j > first) & more, other=0.0)
            into, outof = later_into, later_outof
            after = tl.minimum(n + 1, N - 1)
            later_into, later_outof = _numbers(numbers + after * TOGETHER, C), _numbers(numbers + (N + after) * TOGETHER, C)
            common = (state, g, of_fade, of_written, of_steps, steps, fade, written, into, outof, d_out, d, n, real)
            if starts is None:
                g, of_fade, of_written, of_steps, sums = _back(common, None, None, None, None, None, D, N, C, W)
            elif marked:
                g, of_fade, of_written, of_steps, sums = _back(common, start, stop, initial, d_final, d_initial, D, N, C, W)
            else:
                g, of_fade, of_written, of_steps, sums = _back(common, None, None, None, None, None, D, N, C, W)
            tl.store(carried + mine + n * D, g, mask=real)
            tl.store(d_a + mine + n * D, of_fade, mask=real)
            tl.store(parts + n * TOGETHER, _over_lanes(sums, lanes, 2 * C), mask=lane < 2 * C)
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
