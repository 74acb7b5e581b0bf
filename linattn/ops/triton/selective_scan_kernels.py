"""Kernels of the selective scan: a lane has K channels, a warp 32 K, and a program of one warp walks a segment of time.

Segments run in parallel. ``ends`` walks each from a state of zeros and stores its final state and the sum of its time steps, from
which a state's decay over the segment follows; ``chain`` passes the state from segment to segment; and ``forward`` walks again from
the true states. Backward does the same from the last token to the first.

A walk has tiles of C tokens, whose inputs and outputs stay in registers while the N states of a channel are processed one after the
other. So sums over states need no reduction across lanes, any N is possible, and backward has registers for the C states and decays of
one n. The states before each tile are in memory, [.., N, D]; forward saves those that backward starts from. This file has the
forward pass and helpers of both passes; selective_scan_gradients.py has the backward pass.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from linattn.ops.triton.recurrences import INTERPRETED, LOG2E, _exp2

TOGETHER = tl.constexpr(128)  # contiguous tokens of B and C


class Shape(NamedTuple):
    """Constants of ``prepare``."""

    D: int
    N: int
    NB: int  # N rounded up to a power of two
    TB: int  # tokens of a program


class Channels(NamedTuple):
    """Channels of a program and the number of the state that it computes."""

    d: Any
    n: Any
    real: Any


class Tile(NamedTuple):
    """Inputs of a tile: for each token its step, the number written, and what brings it into the state and out of it."""

    steps: Any
    written: Any
    into: Any
    outof: Any


@triton.jit
def _four(pointer):
    """Four contiguous numbers, 16-byte aligned, in one load; Triton would load them separately."""
    if INTERPRETED:
        four = (tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3))
    else:
        four = tl.inline_asm_elementwise(
            "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=f,=f,=f,=f,l",
            [pointer],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return four


@triton.jit
def _numbers(pointer, C: tl.constexpr):
    """C contiguous tokens of B or C."""
    numbers = ()  # type: tuple
    for i in tl.static_range(0, C, 4):
        four = _four(pointer + i)
        numbers = numbers + (four[0], four[1], four[2], four[3])
    return numbers


@triton.jit
def _place_of(b, t, padded, N: tl.constexpr):
    """Offset of token ``t`` of row ``b`` in [batch, padded / 128, 2, N, 128]."""
    return (b * (padded // TOGETHER) + t // TOGETHER) * (2 * N * TOGETHER) + t % TOGETHER


@triton.jit
def _rows(pointer, corner, t, T, real, D: tl.constexpr, C: tl.constexpr):
    """C rows of [T, D] from token ``t`` on, zeros behind the end."""
    rows = ()  # type: tuple
    for i in tl.static_range(C):
        rows = rows + (tl.load(pointer + corner + i * D, mask=(t + i < T) & real, other=0.0).to(tl.float32),)
    return rows


@triton.jit
def _ahead(pointer, column, row, rows, D: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr):
    """Prefetch COUNT rows of [rows, D] from ``row`` on, 32 K columns from ``column`` on, 32 bytes per lane."""
    if not INTERPRETED:
        size: tl.constexpr = 256 // pointer.dtype.element_ty.primitive_bitwidth
        pieces: tl.constexpr = (32 * K + size - 1) // size
        for first in tl.static_range(0, COUNT * pieces, 32):
            i = first + tl.arange(0, 32)
            of = tl.minimum(row + i // pieces, rows - 1)
            pointers = pointer + of * D + tl.minimum(column + i % pieces * size, D - 1)
            tl.inline_asm_elementwise("{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [pointers], tl.int32, is_pure=False, pack=1)


@triton.jit
def _marks(marks, t, T, C: tl.constexpr):
    """Numbers of the sequences that begin, or end, at the C tokens from ``t`` on; 0: none."""
    found = ()  # type: tuple
    for i in tl.static_range(C):
        found = found + (tl.load(marks + t + i, mask=t + i < T, other=0),)
    return found


@triton.jit
def _any(start, stop, C: tl.constexpr):
    """True if there is any mark; most tiles have none and skip the checks at each token."""
    marked = False
    for i in tl.static_range(C):
        marked = marked | (start[i] > 0) | (stop[i] > 0)
    return marked


@triton.jit
def _given(states, mark, d, n, real, D: tl.constexpr, N: tl.constexpr):
    """Load the state of a mark from [sequences, D, N]; zeros without a mark."""
    given = tl.zeros(d.shape, tl.float32)
    if states is not None:
        given = tl.load(states + ((mark - 1).to(tl.int64) * D + d) * N + n, mask=(mark > 0) & real, other=0.0)
    return given


@triton.jit
def _place(segments, D: tl.constexpr, K: tl.constexpr):
    """Channels, segment and batch row of this program; channels vary fastest, so that adjacent programs share B and C."""
    blocks: tl.constexpr = (D + 32 * K - 1) // (32 * K)
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    d = block * (32 * K) + tl.arange(0, 32 * K)
    real = tl.full([32 * K], True, tl.int1) if D % (32 * K) == 0 else d < D
    return block, d, real, rest % segments, (rest // segments).to(tl.int64)


@triton.jit(do_not_specialize=["b_row", "b_token", "b_state", "c_row", "c_token", "c_state", "T", "padded"])
def prepare(
    a, b, c, faded, both, b_row, b_token, b_state, c_row, c_token, c_state, T, padded, shape: tl.constexpr
):  # fmt: skip
    """A log2(e) as [N, D] in ``faded``, B and C as float32 in ``both``, zeros behind the end."""
    D: tl.constexpr = shape.D
    N: tl.constexpr = shape.N
    NB: tl.constexpr = shape.NB
    TB: tl.constexpr = shape.TB
    n, i = tl.arange(0, NB)[:, None], tl.program_id(0) * TB + tl.arange(0, TB)[None, :]
    row, which = (tl.program_id(1) // 2).to(tl.int64), tl.program_id(1) % 2
    there = (n < N) & (i < T)
    token = i.to(tl.int64)
    if which == 0:
        values = tl.load(b + row * b_row + token * b_token + n * b_state, mask=there, other=0.0).to(tl.float32)
    else:
        values = tl.load(c + row * c_row + token * c_token + n * c_state, mask=there, other=0.0).to(tl.float32)
    tl.store(both + _place_of(row, i, padded, N) + (which * N + n) * TOGETHER, values, mask=(n < N) & (i < padded))
    if tl.program_id(1) == 0:
        for first in range(tl.program_id(0) * TB, D, tl.num_programs(0) * TB):
            d = first + tl.arange(0, TB)[None, :]
            values = tl.load(a + d * N + n, mask=(n < N) & (d < D), other=0.0).to(tl.float32)
            tl.store(faded + n * D + d, values * LOG2E, mask=(n < N) & (d < D))


@triton.jit
def _end(
    state, steps, fade, written, number, marks, given, d, n, real,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """State after a tile, or before it in REVERSE. ``marks``: tokens at which it is replaced by a row of ``given``."""
    for i in tl.static_range(C - 1 if REVERSE else 0, -1 if REVERSE else C, -1 if REVERSE else 1):
        if marks is not None:
            state = tl.where(marks[i] > 0, _given(given, marks[i], d, n, real, D, N), state)
        if REVERSE:
            state = _exp2(steps[i] * fade) * (state + written[i] * number[i])
        else:
            state = _exp2(steps[i] * fade) * state + written[i] * number[i]
    return state


@triton.jit(do_not_specialize=["T", "padded", "tiles", "span", "segments"])
def ends(
    x, dt, a, both, given, starts, stops, left, total, T, padded, tiles, span, segments,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, K: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the final state of each segment of ``span`` tiles: ``left`` [B, segments, N, D] from zeros, and ``total`` [B, segments, D].

    Forward, x are the inputs and ``given`` the initial states; in REVERSE, x are the gradients of the outputs and ``given``
    those of the last states. A total of inf: no state passes, because a sequence begins or ends. The last segment is not needed.
    """
    block, d, real, s, b = _place(segments - 1, D, K)
    s += REVERSE
    first = s * span
    last = tl.minimum(first + span, tiles)
    total_here, cut = tl.zeros([32 * K], tl.float32), False
    mine = left + (b * segments + s) * N * D + d
    for j in range(first, last):
        tile = first + last - 1 - j if REVERSE else j
        t = tile * C
        corner = (b * T + t) * D + d
        steps = _rows(dt, corner, t, T, real, D, C)
        values = _rows(x, corner, t, T, real, D, C)
        ahead = tl.maximum(tile - 1, first) if REVERSE else tl.minimum(tile + 1, last - 1)
        _ahead(dt, block * (32 * K), b * T + ahead * C, b * T + T, D, C, K)
        _ahead(x, block * (32 * K), b * T + ahead * C, b * T + T, D, C, K)
        for i in tl.static_range(C):
            total_here += steps[i]
        written = ()  # type: tuple
        for i in tl.static_range(C):
            written = written + (values[i] if REVERSE else steps[i] * values[i],)
        if starts is not None:
            start, stop = _marks(starts, t, T, C), _marks(stops, t, T, C)
            marked = _any(start, stop, C)
            for i in tl.static_range(C):
                cut = cut | (start[i] > 0) | ((stop[i] > 0) & REVERSE)
        numbers = both + _place_of(b, t, padded, N) + REVERSE * N * TOGETHER
        for n in range(N):
            fade = tl.load(a + n * D + d, mask=real, other=0.0)
            state = tl.load(mine + n * D, mask=(j > first) & real, other=0.0)
            number = _numbers(numbers + n * TOGETHER, C)
            if starts is None:
                state = _end(state, steps, fade, written, number, None, None, d, n, real, D, N, C, REVERSE)
            elif marked:
                state = _end(state, steps, fade, written, number, stop if REVERSE else start, given, d, n, real, D, N, C, REVERSE)
            else:
                state = _end(state, steps, fade, written, number, None, None, d, n, real, D, N, C, REVERSE)
            tl.store(mine + n * D, state, mask=real)
    tl.store(total + (b * segments + s) * D + d, tl.where(cut, float("inf"), total_here), mask=real)


@triton.jit(do_not_specialize=["segments", "rows", "step"])
def chain(
    left, total, a, given, states, segments, rows, step,
    D: tl.constexpr, N: tl.constexpr, DB: tl.constexpr, G: tl.constexpr, PARTS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The state that enters each PARTS-th segment, from ``given`` [B, D, N] or zeros, to row ``step`` i of ``states`` [B, rows, N, D].

    i counts these. In backward a state enters such PARTS segments, or fewer at the end, from the later side.
    """
    blocks: tl.constexpr = (D + DB - 1) // DB
    d = tl.program_id(0) % blocks * DB + tl.arange(0, DB)
    n = tl.program_id(0) // blocks % N
    b = (tl.program_id(0) // blocks // N).to(tl.int64)
    real = d < D
    fade = tl.load(a + n * D + d, mask=real, other=0.0)
    state = tl.zeros([DB], tl.float32)
    if given is not None:
        state = tl.load(given + (b * D + d) * N + n, mask=real, other=0.0)
    for first in range(0, segments, G):
        pieces = ()  # type: tuple
        for i in tl.static_range(G):  # all loads are issued before the first is used
            there = (first + i < segments - 1) & real
            s = segments - 1 - first - i if REVERSE else first + i
            own, passed = state, state
            if left is not None:
                own = tl.load(left + ((b * segments + s) * N + n) * D + d, mask=there, other=0.0)
                passed = tl.load(total + (b * segments + s) * D + d, mask=there, other=0.0)
            pieces = pieces + ((own, passed),)
        for i in tl.static_range(G):
            s = segments - 1 - first - i if REVERSE else first + i
            enters = (s == segments - 1) | (s % PARTS == PARTS - 1) if REVERSE else s % PARTS == 0
            to = states + ((b * rows + s // PARTS * step) * N + n) * D + d
            tl.store(to, state, mask=enters & (first + i < segments) & real)
            own, passed = pieces[i]
            state = tl.where(passed == float("inf"), own, _exp2(passed * fade) * state + own)


@triton.jit
def _pass(state, out, fade, tile, start, stop, initial, final, place, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr):
    """State after a tile, and ``out`` plus its outputs. Marks restart the state, and store it in ``final`` where a sequence ends."""
    d, n, real = place
    sums = ()  # type: tuple
    for i in tl.static_range(C):
        if start is not None:
            state = tl.where(start[i] > 0, _given(initial, start[i], d, n, real, D, N), state)
        state = _exp2(tile.steps[i] * fade) * state + tile.written[i] * tile.into[i]
        sums = sums + (out[i] + state * tile.outof[i],)
        if start is not None:
            tl.store(final + ((stop[i] - 1).to(tl.int64) * D + d) * N + n, state, mask=(stop[i] > 0) & real)
    return state, sums


@triton.jit(do_not_specialize=["T", "padded", "tiles", "span", "segments"])
def forward(
    x, dt, a, both, skip, initial, starts, stops, states, last_states, y, final, T, padded, tiles, span, segments,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, K: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """y [B, T, D] and the last states, ``final`` [sequences, D, N].

    ``states`` has what enters the segments. KEEP: it is [B, tiles, N, D], and gets the states before all other tiles; else it is
    [B, segments, N, D], and the states change there. ``last_states`` [B, N, D] is for those after the last tile.
    """
    block, d, real, s, b = _place(segments, D, K)
    first = s * span
    last = tl.minimum(first + span, tiles)
    passing = tl.zeros([32 * K], tl.float32)
    if skip is not None:
        passing = tl.load(skip + d, mask=real, other=0.0).to(tl.float32)
    for tile in range(first, last):
        t = tile * C
        corner = (b * T + t) * D + d
        steps = _rows(dt, corner, t, T, real, D, C)
        values = _rows(x, corner, t, T, real, D, C)
        ahead = tl.minimum(tile + 1, last - 1)
        _ahead(dt, block * (32 * K), b * T + ahead * C, b * T + T, D, C, K)
        _ahead(x, block * (32 * K), b * T + ahead * C, b * T + T, D, C, K)
        written, out = (), ()  # type: tuple, tuple
        for i in tl.static_range(C):
            written = written + (steps[i] * values[i],)
            out = out + (passing * values[i],)
        if starts is not None:
            start, stop = _marks(starts, t, T, C), _marks(stops, t, T, C)
            marked = _any(start, stop, C)
        before = states + (b * tiles + tile if KEEP else b * segments + s) * N * D + d
        after = before + N * D if KEEP else before
        inner = tile + 1 < last
        if starts is None:  # the final state was stored in the layout in which it is read
            after = tl.where(inner, after, last_states + b * N * D + d)
            inner = inner | (tile + 1 == tiles)
        numbers = both + _place_of(b, t, padded, N)
        for n in range(N):
            fade = tl.load(a + n * D + d, mask=real, other=0.0)
            state = tl.load(before + n * D, mask=real, other=0.0)
            here = Tile(steps, written, _numbers(numbers + n * TOGETHER, C), _numbers(numbers + (N + n) * TOGETHER, C))
            place = Channels(d, n, real)
            if starts is None:
                state, out = _pass(state, out, fade, here, None, None, None, final, place, D, N, C)
            elif marked:
                state, out = _pass(state, out, fade, here, start, stop, initial, final, place, D, N, C)
            else:
                state, out = _pass(state, out, fade, here, None, None, None, final, place, D, N, C)
            tl.store(after + n * D, state, mask=inner & real)
        for i in tl.static_range(C):
            tl.store(y + corner + i * D, out[i].to(y.dtype.element_ty), mask=(t + i < T) & real)
    if starts is None:
        if s == segments - 1:
            for n in range(N):
                state = tl.load(last_states + (b * N + n) * D + d, mask=real, other=0.0)
                tl.store(final + (b * D + d) * N + n, state, mask=real)
