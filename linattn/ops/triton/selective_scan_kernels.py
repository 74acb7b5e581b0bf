"""Kernels of the selective scan: a lane has several channels, and a program walks a segment of time with DB channels.

Segments run in parallel. ``ends`` walks each from a state of zeros and stores its final state and the sum of its time steps, from
which a state's decay over the segment follows; ``chain`` passes the state from segment to segment; and ``forward`` walks again from
the true states. Backward does the same from the last token to the first.

A walk has tiles of C tokens, whose inputs and outputs stay in registers while the N states of a channel are processed one after the
other. So sums over states need no reduction across lanes. A walk keeps H states of a channel in registers; there are N / H of them.
Forward saves the states before each group of tiles, [.., N, D]; backward computes those within a group again, and has registers for
the C states and decays of one n. This file has the forward pass and helpers of both passes; selective_scan_gradients.py has the
backward pass.
"""

from typing import NamedTuple

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
def _ahead(pointer, column, row, rows, D: tl.constexpr, COUNT: tl.constexpr, DB: tl.constexpr):
    """Prefetch COUNT rows of [rows, D] from ``row`` on, DB columns from ``column`` on, 32 bytes per lane."""
    if not INTERPRETED:
        size: tl.constexpr = 256 // pointer.dtype.element_ty.primitive_bitwidth
        pieces: tl.constexpr = (DB + size - 1) // size
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
def _place(segments, D: tl.constexpr, DB: tl.constexpr):
    """Channels, segment and batch row of this program; channels vary fastest, so that adjacent programs share B and C."""
    blocks: tl.constexpr = (D + DB - 1) // DB
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    d = block * DB + tl.arange(0, DB)
    real = tl.full([DB], True, tl.int1) if D % DB == 0 else d < D
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


@triton.jit
def _zeros(DB: tl.constexpr, H: tl.constexpr):
    """H states of zeros."""
    states = ()  # type: tuple
    for _ in tl.static_range(H):
        states = states + (tl.zeros([DB], tl.float32),)
    return states


@triton.jit
def _states(pointer, real, step, H: tl.constexpr):
    """Load H states of each channel, or numbers of these states, ``step`` apart."""
    states = ()  # type: tuple
    for h in tl.static_range(H):
        states = states + (tl.load(pointer + h * step, mask=real, other=0.0),)
    return states


@triton.jit
def _save(pointer, states, real, step, H: tl.constexpr):
    """Store H states of each channel, ``step`` apart."""
    for h in tl.static_range(H):
        tl.store(pointer + h * step, states[h], mask=real)


@triton.jit
def _ends(
    states, steps, fades, written, numbers, marks, given, d, m, real,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, H: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The H states from ``m`` on after a tile, or before it in REVERSE."""
    moved = ()  # type: tuple
    for h in tl.static_range(H):
        number = _numbers(numbers + h * TOGETHER, C)
        moved = moved + (_end(states[h], steps, fades[h], written, number, marks, given, d, m + h, real, D, N, C, REVERSE),)
    return moved


@triton.jit(do_not_specialize=["T", "padded", "tiles", "span", "segments"])
def ends(
    x, dt, a, both, given, starts, stops, left, total, T, padded, tiles, span, segments,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, DB: tl.constexpr, H: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the final state of each segment of ``span`` tiles: ``left`` [B, segments, N, D] from zeros, and ``total`` [B, segments, D].

    Forward, x are the inputs and ``given`` the initial states; in REVERSE, x are the gradients of the outputs and ``given``
    those of the last states. A total of inf: no state passes, because a sequence begins or ends. The last segment is not needed.
    """
    block, d, real, s, b = _place(segments - 1, D, DB)
    s += REVERSE
    first = s * span
    last = tl.minimum(first + span, tiles)
    mine = left + (b * segments + s) * N * D + d
    for m in range(0, N, H):
        total_here, cut = tl.zeros([DB], tl.float32), False
        fades, states = _states(a + m * D + d, real, D, H), _zeros(DB, H)
        for j in range(first, last):
            tile = first + last - 1 - j if REVERSE else j
            t = tile * C
            corner = (b * T + t) * D + d
            steps = _rows(dt, corner, t, T, real, D, C)
            values = _rows(x, corner, t, T, real, D, C)
            ahead = tl.maximum(tile - 1, first) if REVERSE else tl.minimum(tile + 1, last - 1)
            _ahead(dt, block * DB, b * T + ahead * C, b * T + T, D, C, DB)
            _ahead(x, block * DB, b * T + ahead * C, b * T + T, D, C, DB)
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
            numbers = both + _place_of(b, t, padded, N) + (REVERSE * N + m) * TOGETHER
            if starts is None:
                states = _ends(states, steps, fades, written, numbers, None, None, d, m, real, D, N, C, H, REVERSE)
            elif marked:
                states = _ends(
                    states, steps, fades, written, numbers, stop if REVERSE else start, given, d, m, real, D, N, C, H, REVERSE
                )  # fmt: skip
            else:
                states = _ends(states, steps, fades, written, numbers, None, None, d, m, real, D, N, C, H, REVERSE)
        _save(mine + m * D, states, real, D, H)
        tl.store(total + (b * segments + s) * D + d, tl.where(cut, float("inf"), total_here), mask=real)


@triton.jit(do_not_specialize=["segments"])
def chain(
    left, total, a, given, states, segments,
    D: tl.constexpr, N: tl.constexpr, DB: tl.constexpr, G: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The states [B, segments, N, D] that enter the segments, of which the first, in REVERSE the last, is ``given`` [B, D, N] or zeros."""
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
            to = states + ((b * segments + s) * N + n) * D + d
            tl.store(to, state, mask=(first + i < segments) & real)
            own, passed = pieces[i]
            state = tl.where(passed == float("inf"), own, _exp2(passed * fade) * state + own)


@triton.jit
def _pass(
    states, out, fades, steps, written, numbers, start, stop, initial, final, d, m, real,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """The H states from ``m`` on after a tile, and ``out`` plus their outputs.

    Marks restart a state, and store it in ``final`` where a sequence ends.
    """
    moved = ()  # type: tuple
    for h in tl.static_range(H):
        state = states[h]
        sums = ()  # type: tuple
        into, outof = _numbers(numbers + h * TOGETHER, C), _numbers(numbers + (N + h) * TOGETHER, C)
        for i in tl.static_range(C):
            if start is not None:
                state = tl.where(start[i] > 0, _given(initial, start[i], d, m + h, real, D, N), state)
            state = _exp2(steps[i] * fades[h]) * state + written[i] * into[i]
            sums = sums + (out[i] + state * outof[i],)
            if start is not None:
                tl.store(final + ((stop[i] - 1).to(tl.int64) * D + d) * N + m + h, state, mask=(stop[i] > 0) & real)
        moved, out = moved + (state,), sums
    return moved, out


@triton.jit(do_not_specialize=["T", "padded", "tiles", "span", "segments"])
def forward(
    x, dt, a, both, skip, initial, starts, stops, states, kept, sums, y, final, T, padded, tiles, span, segments,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, DB: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y [B, T, D] and the last states, ``final`` [sequences, D, N].

    ``states`` [B, segments, N, D] has what enters the segments. ``kept`` [B, groups, N, D] gets the states before each GROUP of tiles.
    ``sums`` [B, T, D] has the sums of the outputs over the states so far if not all N are computed at a time.
    """
    block, d, real, s, b = _place(segments, D, DB)
    first = s * span
    last = tl.minimum(first + span, tiles)
    passing = tl.zeros([DB], tl.float32)
    if skip is not None:
        passing = tl.load(skip + d, mask=real, other=0.0).to(tl.float32)
    for m in range(0, N, H):
        fades, here = _states(a + m * D + d, real, D, H), _states(states + ((b * segments + s) * N + m) * D + d, real, D, H)
        for tile in range(first, last):
            t = tile * C
            corner = (b * T + t) * D + d
            if kept is not None:
                if tile % GROUP == 0:
                    groups = (tiles + GROUP - 1) // GROUP
                    _save(kept + ((b * groups + tile // GROUP) * N + m) * D + d, here, real, D, H)
            steps = _rows(dt, corner, t, T, real, D, C)
            values = _rows(x, corner, t, T, real, D, C)
            ahead = tl.minimum(tile + 1, last - 1)
            _ahead(dt, block * DB, b * T + ahead * C, b * T + T, D, C, DB)
            _ahead(x, block * DB, b * T + ahead * C, b * T + T, D, C, DB)
            written, out = (), ()  # type: tuple, tuple
            for i in tl.static_range(C):
                written = written + (steps[i] * values[i],)
            if H == N:
                for i in tl.static_range(C):
                    out = out + (passing * values[i],)
            else:
                for i in tl.static_range(C):
                    earlier = tl.load(sums + corner + i * D, mask=(m > 0) & (t + i < T) & real, other=0.0)
                    out = out + (tl.where(m > 0, earlier, passing * values[i]),)
            numbers = both + _place_of(b, t, padded, N) + m * TOGETHER
            if starts is None:
                here, out = _pass(here, out, fades, steps, written, numbers, None, None, None, final, d, m, real, D, N, C, H)
            else:
                start, stop = _marks(starts, t, T, C), _marks(stops, t, T, C)
                if _any(start, stop, C):
                    here, out = _pass(here, out, fades, steps, written, numbers, start, stop, initial, final, d, m, real, D, N, C, H)
                else:
                    here, out = _pass(here, out, fades, steps, written, numbers, None, None, None, final, d, m, real, D, N, C, H)
            for i in tl.static_range(C):
                if H < N:
                    tl.store(sums + corner + i * D, out[i], mask=(m + H < N) & (t + i < T) & real)
                tl.store(y + corner + i * D, out[i].to(y.dtype.element_ty), mask=(m + H == N) & (t + i < T) & real)
        if starts is None:
            if s == segments - 1:
                _save(final + (b * D + d) * N + m, here, real, 1, H)
