"""Kernels of the elementwise recurrences: memory is read once, and the state is passed from program to program along time (decoupled
look-back).

A tile is S spans of C tokens, by DB channels: a warp has a span, a thread all tokens of its channels. The tiles of the same channels,
in the order of time, are a chain. P programs share a chain and take its tiles in turn; each prefetches its next tile while it processes
the current one. A program runs over a tile twice: from an empty state, for the sum of each span, and from the entering state, for the
results.

Between the two runs a program publishes the sums of its tile (``total``, the decay of a state over the tile, and ``own``, the state
from an empty start), and passes the state after its last tile over the P - 1 tiles in between. The order is always the same, so the
same inputs give the same bits. Both numbers are one 64-bit word, written atomically; a program waits while a word is 0. All
programs of a chain must run at the same time.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from linattn.ops.triton.recurrences import (
    INTERPRETED,
    NEAR,
    held_form,
    is_near,
    join,
    kept,
    longer,
    nothing,
    past,
    reset,
    up_to,
    up_to_and_before,
)  # fmt: skip


class Shape(NamedTuple):
    """Constants of a scan."""

    D: int
    kind: str
    C: int  # tokens of a span
    S: int  # spans of a tile
    DB: int  # channels of a tile
    W: int  # most programs of a chain, a power of two
    CONSTANT: bool  # the decay is constant
    STAGES: int


@triton.jit
def _word(total, own):
    """Pack two numbers into a word whose complement is never 0, because no arithmetic gives two NaNs with all bits set."""
    low = total.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = own.to(tl.uint32, bitcast=True).to(tl.uint64)
    return ~(low | (high << 32)).to(tl.int64, bitcast=True)


@triton.jit
def _halves(word):
    word = ~word
    low = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    high = ((word >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _await(pointers, words):
    """Wait until none of the words at ``pointers``, which were loaded as ``words``, is 0, and return them."""
    if not INTERPRETED:
        words = tl.inline_asm_elementwise(
            """{
            .reg .pred one, two, any;
            mov.b64 $0, $4;
            mov.b64 $1, $5;
            again:
            setp.eq.s64 one, $0, 0;
            setp.eq.s64 two, $1, 0;
            or.pred any, one, two;
            @!any bra there;
            @one ld.relaxed.gpu.global.b64 $0, [$2];
            @two ld.relaxed.gpu.global.b64 $1, [$3];
            bra again;
            there:
            }""",
            "=&l,=&l,l,l,l,l",
            [pointers, words],
            tl.int64,
            is_pure=False,
            pack=2,
        )
    return words


@triton.jit
def _entering(kind: tl.constexpr, carry, total, own, words, tile, chain, chains, programs, DB: tl.constexpr, W: tl.constexpr):
    """States [S, DB] before and after the spans of ``tile``, whose sums are ``total`` and ``own``.

    The last row of ``carry`` [S, DB] is the state after the tile ``programs`` earlier, which is less than W, or before the first one.
    """
    S: tl.constexpr = total.shape[0]
    span = tl.arange(0, S)[:, None]
    total, own, before_total, before_own = up_to_and_before(kind, total, own)
    if programs > 1:
        width = chains.to(tl.int64) * DB
        channels = chain * DB + tl.arange(0, DB)[None, :]
        here = words + tile * width + channels
        tl.store(here + 0 * span, _word(total, own), mask=(span == S - 1) & (channels >= 0))
        between_total, between_own = tl.full([S, DB], kept(kind), tl.float32), tl.full([S, DB], nothing(kind), tl.float32)
        no_word = _word(between_total, between_own)
        pieces = ()  # type: tuple
        for i in tl.static_range(W // S):
            back = programs - 1 - (span * (W // S) + i)
            place = here - back * width
            piece = tl.load(place, mask=(back > 0) & (back <= tile) & (channels >= 0), other=no_word, volatile=True)
            pieces = pieces + ((place, piece),)
        for i in tl.static_range(W // S):
            piece_total, piece_own = _halves(_await(pieces[i][0], pieces[i][1]))
            between_own = past(kind, between_own, piece_total, piece_own)
            between_total = longer(kind, between_total, piece_total)
        between_total, between_own = up_to(kind, between_total, between_own)
        carry = past(kind, carry, between_total, between_own)
    state = tl.sum(tl.where(span == S - 1, carry, 0.0), 0, keep_dims=True)
    return past(kind, state, before_total, before_own), past(kind, state, total, own)


@triton.jit
def _bits(marks, t, step: tl.constexpr, T, C: tl.constexpr):
    """Bits [S, 1], bit i set if the span's token t + step i has a mark; and their union over the spans."""
    i = tl.arange(0, C)[None, :]
    at = t + step * i
    marked = tl.load(marks + at, mask=(at >= 0) & (at < T), other=0) > 0
    bits = tl.sum(tl.where(marked, 1 << i, 0), 1, keep_dims=True)
    return bits, tl.reduce(bits, None, _or)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _given(kind: tl.constexpr, states, marks, some, i: tl.constexpr, t, T, D: tl.constexpr, d, real, S: tl.constexpr):
    """Load the rows of ``states`` [N, D] given by the marks of tokens ``t``, empty states without marks. Bit i of ``some``: any mark."""
    given = tl.full([S, d.shape[1]], nothing(kind), tl.float32)
    if states is not None:
        if (some >> i) & 1:
            n = tl.load(marks + t, mask=(t >= 0) & (t < T), other=0) - 1
            given = tl.load(states + n.to(tl.int64) * D + d, mask=(n >= 0) & real, other=nothing(kind))
    return given


@triton.jit
def _leave(state, states, marks, some, i: tl.constexpr, t, T, D: tl.constexpr, d, real):
    """Store ``state`` in the rows of ``states`` given by the marks of tokens ``t``."""
    if (some >> i) & 1:
        n = tl.load(marks + t, mask=(t >= 0) & (t < T), other=0) - 1
        tl.store(states + n.to(tl.int64) * D + d, state, mask=(n >= 0) & real)


@triton.jit(do_not_specialize=["T", "tiles", "chains", "programs"])
def forward(
    decay, x, initial, starts, ends, out, final, words, T, tiles, chains, programs,
    shape: tl.constexpr,
):  # fmt: skip
    """decay [B, T, D] or [D], x and out [B, T, D], initial and final [N, D]; packed if there are starts and ends, see ``boundaries``."""
    D: tl.constexpr = shape.D
    kind: tl.constexpr = shape.kind
    C: tl.constexpr = shape.C
    S: tl.constexpr = shape.S
    DB: tl.constexpr = shape.DB
    W: tl.constexpr = shape.W
    CONSTANT: tl.constexpr = shape.CONSTANT
    per_row: tl.constexpr = (D + DB - 1) // DB
    lanes = tl.num_programs(0) // programs
    span = tl.arange(0, S)[:, None]
    for chain in range(tl.program_id(0) % lanes, chains, lanes):
        b = chain // per_row + tl.zeros([1, 1], tl.int64)
        d = (chain % per_row) * DB + tl.arange(0, DB)[None, :]
        real = tl.full([1, DB], True, tl.int1) if D % DB == 0 else d < D
        carry = tl.full([S, DB], nothing(kind), tl.float32)
        if starts is None and initial is not None:
            carry = tl.load(initial + b * D + d + 0 * span, mask=real & (span >= 0), other=nothing(kind))
        if CONSTANT:
            constant = tl.load(decay + d + 0 * span, mask=real & (span >= 0), other=0.0).to(tl.float32)
        for tile in tl.range(tl.program_id(0) // lanes, tiles, programs, num_stages=shape.STAGES):
            t = (tile * S + span) * C  # [S, 1]: the first token of each span
            room = T - t
            corner = (b * T + t) * D + d
            loaded = ()  # type: tuple
            for i in tl.static_range(C):
                there = (t + i < T) & real
                later = tl.load(x + corner + i * D, mask=there, other=0.0)
                loaded = loaded + ((later if CONSTANT else tl.load(decay + corner + i * D, mask=there, other=0.0), later),)
            if starts is not None:
                start, some_start = _bits(starts, t, 1, T, C)
                _, some_end = _bits(ends, t, 1, T, C)
            rows = ()  # type: tuple
            total, own = tl.zeros([S, DB], tl.float32), tl.full([S, DB], nothing(kind), tl.float32)
            for i in tl.static_range(C):
                log = tl.where(t + i < T, constant, 0.0) if CONSTANT else loaded[i][0].to(tl.float32)
                later = loaded[i][1]
                if kind == "maximum":
                    later = tl.where(t + i < T, later.to(tl.float32), nothing(kind))
                held = held_form(kind, log)
                total += log
                if starts is not None:
                    here = ((start >> i) & 1) != 0
                    own = tl.where(here, _given(kind, initial, starts, some_start, i, t + i, T, D, d, real, S), own)
                    total = tl.where(here, reset(kind), total)
                own = join(kind, own, held, log > NEAR, later.to(tl.float32))
                rows = rows + ((held, later),)
            state, carry = _entering(kind, carry, total, own, words, tile, chain, chains, programs, DB, W)
            for i in tl.static_range(C):
                if starts is not None:
                    here = ((start >> i) & 1) != 0
                    state = tl.where(here, _given(kind, initial, starts, some_start, i, t + i, T, D, d, real, S), state)
                state = join(kind, state, rows[i][0], is_near(rows[i][0]), rows[i][1].to(tl.float32))
                tl.store(out + corner + i * D, state.to(out.dtype.element_ty), mask=(room > i) & real)
                if starts is not None:
                    _leave(state, final, ends, some_end, i, t + i, T, D, d, real)
            if starts is None:
                tl.store(final + b * D + d + 0 * span, state, mask=(tile == tiles - 1) & (span == S - 1) & real)


@triton.jit(do_not_specialize=["T", "tiles", "chains", "programs"])
def backward(
    decay, x, out, initial, d_out, d_final, starts, ends, d_decay, d_x, d_initial, words, T, tiles, chains, programs,
    shape: tl.constexpr,
):  # fmt: skip
    """Gradients, from the last token to the first; the state is g, the gradient of what a token receives from the one before it.

    With dh = d_out + g of the next token: "sum" has g = exp(decay) dh, d_x = dh and d_decay = g h of the token before;
    "maximum" has g = d_decay = dh or 0 (half where both sides are equal) and d_x = dh - g. A constant decay gets d_decay in parts
    [B tiles S, D]. d_decay and d_initial are None if not requested; d_final may be None. Only "maximum" reads x.
    """
    D: tl.constexpr = shape.D
    kind: tl.constexpr = shape.kind
    C: tl.constexpr = shape.C
    S: tl.constexpr = shape.S
    DB: tl.constexpr = shape.DB
    W: tl.constexpr = shape.W
    CONSTANT: tl.constexpr = shape.CONSTANT
    linear: tl.constexpr = "linear" if kind == "maximum" else kind
    per_row: tl.constexpr = (D + DB - 1) // DB
    lanes = tl.num_programs(0) // programs
    span = tl.arange(0, S)[:, None]
    for chain in range(tl.program_id(0) % lanes, chains, lanes):
        b = chain // per_row + tl.zeros([1, 1], tl.int64)
        d = (chain % per_row) * DB + tl.arange(0, DB)[None, :]
        real = tl.full([1, DB], True, tl.int1) if D % DB == 0 else d < D
        everywhere = real & (span >= 0)
        carry = tl.zeros([S, DB], tl.float32)
        if ends is None and d_final is not None:
            carry = tl.load(d_final + b * D + d + 0 * span, mask=everywhere, other=0.0)
        first = tl.full([S, DB], nothing(kind), tl.float32)
        if starts is None and initial is not None:
            first = tl.load(initial + b * D + d + 0 * span, mask=everywhere, other=0.0)
        if CONSTANT:
            constant = tl.load(decay + d + 0 * span, mask=everywhere, other=0.0).to(tl.float32)
        reads: tl.constexpr = kind == "maximum" or d_decay is not None
        for tile in tl.range(tl.program_id(0) // lanes, tiles, programs, num_stages=shape.STAGES):
            t = T - 1 - (tile * S + span) * C  # [S, 1]: the last token of each span
            corner = (b * T + t) * D + d
            loaded = ()  # type: tuple
            for i in tl.static_range(C):
                there = (t >= i) & real
                later = tl.load(d_out + corner - i * D, mask=there, other=0.0)
                log = later if CONSTANT else tl.load(decay + corner - i * D, mask=there, other=0.0)
                before = tl.load(out + corner - (i + 1) * D, mask=(t > i) & real, other=0.0) if reads else later
                gate = tl.load(x + corner - i * D, mask=there, other=0.0) if kind == "maximum" else later
                loaded = loaded + ((log, later, before, gate),)
            if starts is not None:
                start, some_start = _bits(starts, t, -1, T, C)
                end, some_end = _bits(ends, t, -1, T, C)
            rows = ()  # type: tuple
            total, own = tl.full([S, DB], kept(linear), tl.float32), tl.zeros([S, DB], tl.float32)
            for i in tl.static_range(C):
                log = tl.where(t >= i, constant, 0.0) if CONSTANT else loaded[i][0].to(tl.float32)
                before = loaded[i][2]
                if reads:
                    if starts is not None:
                        given = _given(kind, initial, starts, some_start, i, t - i, T, D, d, real, S)
                        before = tl.where(((start >> i) & 1) != 0, given, before.to(tl.float32))
                    elif initial is not None or kind == "maximum":
                        before = tl.where(t == i, first, before.to(tl.float32))
                if kind == "maximum":
                    carried, gate = log + before, loaded[i][3].to(tl.float32)
                    log = tl.where((carried > gate) | (t < i), 1.0, tl.where(carried == gate, 0.5, 0.0))
                held = held_form(linear, log)
                total = longer(linear, total, log)
                if ends is not None:
                    here = ((end >> i) & 1) != 0
                    own = tl.where(here, _given(linear, d_final, ends, some_end, i, t - i, T, D, d, real, S), own)
                    total = tl.where(here, reset(linear), total)
                own = join(linear, own + loaded[i][1].to(tl.float32), held, log > NEAR, 0.0)
                rows = rows + ((held, before),)
            g, carry = _entering(linear, carry, total, own, words, tile, chain, chains, programs, DB, W)
            part = tl.zeros([S, DB], tl.float32)
            for i in tl.static_range(C):
                there = (t + 1 > i) & real
                if ends is not None:
                    g = tl.where(((end >> i) & 1) != 0, _given(linear, d_final, ends, some_end, i, t - i, T, D, d, real, S), g)
                dh = g + loaded[i][1].to(tl.float32)
                g = join(linear, dh, rows[i][0], is_near(rows[i][0]), 0.0)
                tl.store(d_x + corner - i * D, (dh - g if kind == "maximum" else dh).to(d_x.dtype.element_ty), mask=there)
                if d_decay is not None:
                    of_decay = g * rows[i][1].to(tl.float32) if kind == "sum" else g
                    if CONSTANT:
                        part += tl.where(there, of_decay, 0.0)
                    else:
                        tl.store(d_decay + corner - i * D, of_decay.to(d_decay.dtype.element_ty), mask=there)
                if starts is not None and d_initial is not None:
                    _leave(g, d_initial, starts, some_start, i, t - i, T, D, d, real)
            if starts is None and d_initial is not None:
                tl.store(d_initial + b * D + d + 0 * span, g, mask=(tile == tiles - 1) & (span == S - 1) & real)
            if CONSTANT and d_decay is not None:
                tl.store(d_decay + ((b * tiles + tile) * S + span) * D + d, part, mask=everywhere)


@triton.jit(do_not_specialize=["T"])
def boundaries(cu_seqlens, before, starts, ends, after, T, D: tl.constexpr, empty: tl.constexpr, DB: tl.constexpr):
    """Number the sequences from 1: ``starts`` has the number at its first token, ``ends`` at its last one; both [T], 0 before.

    A sequence without tokens keeps its state: ``before``, or ``empty`` without it, is copied to ``after`` (both [N, D]).
    """
    n = tl.program_id(0)
    start, stop = tl.load(cu_seqlens + n), tl.load(cu_seqlens + n + 1)
    if (start >= 0) & (start < stop) & (stop <= T):
        tl.store(starts + start, n + 1)
        tl.store(ends + stop - 1, n + 1)
    elif after is not None:
        for first in range(0, D, DB):
            d = first + tl.arange(0, DB)
            row = n.to(tl.int64) * D + d
            state = tl.full([DB], empty, tl.float32) if before is None else tl.load(before + row, mask=d < D)
            tl.store(after + row, state, mask=d < D)
