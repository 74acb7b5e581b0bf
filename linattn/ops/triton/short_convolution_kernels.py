"""Kernels of the short convolution: a program of one warp has DB channels and walks a segment of time.

The last W - 1 inputs, and backward the last W - 1 gradients before the SiLU, stay in registers, so that each number is read once
and the sigmoid is computed once. C tokens are loaded before the first of them is used. The gradients of weight and bias are summed
over a segment in registers; the sums of segments are added afterwards, in an order that depends only on shapes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from linattn.ops.triton.recurrences import LOG2E, _exp2


class Shape(NamedTuple):
    """Constants of a kernel."""

    D: int
    W: int  # taps
    DB: int  # channels of a program
    C: int  # tokens that are read at a time
    ACTIVATION: bool


@triton.jit
def _place(segments, D: tl.constexpr, DB: tl.constexpr):
    """Channels, segment and row of this program."""
    blocks: tl.constexpr = (D + DB - 1) // DB
    block, rest = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    d = block * DB + tl.arange(0, DB)
    real = tl.full([DB], True, tl.int1) if D % DB == 0 else d < D
    return d, real, rest % segments, (rest // segments).to(tl.int64)


@triton.jit
def _taps(weight, d, real, W: tl.constexpr):
    taps = ()  # type: tuple
    for i in tl.static_range(W):
        taps = taps + (tl.load(weight + d * W + i, mask=real, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _history(x, before, row, start, d, real, x_token, D: tl.constexpr, W: tl.constexpr):
    """The W - 1 inputs before token ``start``, to which ``x`` points."""
    seen = ()  # type: tuple
    for i in tl.static_range(W - 1):
        t = start + (i - (W - 1))
        value = tl.load(x + (i - (W - 1)) * x_token + d, mask=(t >= 0) & real, other=0.0).to(tl.float32)
        if before is not None:
            kept = tl.load(before + (row * (W - 1) + (W - 1) + t) * D + d, mask=(t < 0) & real, other=0.0).to(tl.float32)
            value = tl.where(t < 0, kept, value)
        seen = seen + (value,)
    return seen


@triton.jit
def _rows(x, first, count, d, real, x_token, C: tl.constexpr):
    """C rows from the ``first`` after that to which ``x`` points, zeros from number ``count`` on."""
    rows = ()  # type: tuple
    for i in tl.static_range(C):
        rows = rows + (tl.load(x + (first + i) * x_token + d, mask=(first + i < count) & real, other=0.0),)
    return rows


@triton.jit
def _sum(seen, now, taps, offset, W: tl.constexpr):
    total = now * taps[W - 1] + offset
    for i in tl.static_range(W - 1):
        total += seen[i] * taps[i]
    return total


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + _exp2(-z * LOG2E))


@triton.jit(do_not_specialize=["T", "segments", "span"])
def forward(
    x, before, weight, bias, y, x_row, x_token, T, segments, span, shape: tl.constexpr
):  # fmt: skip
    """``x`` [B, T, D] with strides, ``before`` [B, W - 1, D], ``weight`` [D, W], ``bias`` [D]: ``y`` [B, T, D]."""
    D: tl.constexpr = shape.D
    W: tl.constexpr = shape.W
    DB: tl.constexpr = shape.DB
    C: tl.constexpr = shape.C
    d, real, segment, row = _place(segments, D, DB)
    start = segment * span
    count = tl.minimum(span, T - start)
    x += row * x_row + start.to(tl.int64) * x_token
    y += (row * T + start) * D
    taps = _taps(weight, d, real, W)
    offset = tl.zeros([DB], tl.float32)
    if bias is not None:
        offset = tl.load(bias + d, mask=real, other=0.0).to(tl.float32)
    seen = _history(x, before, row, start, d, real, x_token, D, W)
    for t in range(0, count, C):
        rows = _rows(x, t, count, d, real, x_token, C)
        for i in tl.static_range(C):
            now = rows[i].to(tl.float32)
            z = _sum(seen, now, taps, offset, W)
            if shape.ACTIVATION:
                z = z * _sigmoid(z)
            tl.store(y + (t + i) * D + d, z.to(y.dtype.element_ty), mask=(t + i < count) & real)
            seen = seen[1:] + (now,)


@triton.jit(do_not_specialize=["T", "segments", "span"])
def backward(
    x, before, weight, bias, d_y, d_x, d_before, parts, x_row, x_token, y_row, y_token, T, segments, span, shape: tl.constexpr
):  # fmt: skip
    """``d_y`` [B, T, D] with strides: ``d_x``, ``d_before``, and ``parts`` [B, segments, W + 1, D] of weight and bias.

    An input contributes to W tokens, so its gradient is complete W - 1 tokens later; a segment is continued that far.
    """
    D: tl.constexpr = shape.D
    W: tl.constexpr = shape.W
    DB: tl.constexpr = shape.DB
    C: tl.constexpr = shape.C
    d, real, segment, row = _place(segments, D, DB)
    start = segment * span
    count = tl.minimum(span, T - start)
    there = tl.minimum(count + W - 1, T - start)
    x += row * x_row + start.to(tl.int64) * x_token
    d_y += row * y_row + start.to(tl.int64) * y_token
    d_x += (row * T + start) * D
    taps = _taps(weight, d, real, W)
    offset = tl.zeros([DB], tl.float32)
    if bias is not None:
        offset = tl.load(bias + d, mask=real, other=0.0).to(tl.float32)
    seen = _history(x, before, row, start, d, real, x_token, D, W)
    later, sums = (), ()  # type: tuple, tuple
    for _ in tl.static_range(W - 1):
        later = later + (tl.zeros([DB], tl.float32),)
    for _ in tl.static_range(W + 1):
        sums = sums + (tl.zeros([DB], tl.float32),)
    for t in range(0, count + W - 1, C):
        rows = _rows(x, t, there, d, real, x_token, C)
        gradients = _rows(d_y, t, there, d, real, y_token, C)
        for i in tl.static_range(C):
            now, dz = rows[i].to(tl.float32), gradients[i].to(tl.float32)
            if shape.ACTIVATION:
                z = _sum(seen, now, taps, offset, W)
                sigmoid = _sigmoid(z)
                dz *= sigmoid * (1.0 + z * (1.0 - sigmoid))
            own = tl.where(t + i < count, dz, 0.0)
            added = ()  # type: tuple
            for j in tl.static_range(W - 1):
                added = added + (sums[j] + own * seen[j],)
            sums = added + (sums[W - 1] + own * now, sums[W] + own)
            whole = dz * taps[0]
            for j in tl.static_range(W - 1):
                whole += later[j] * taps[W - 1 - j]
            s = t + i - (W - 1)  # the token whose gradient is complete
            tl.store(d_x + s * D + d, whole.to(d_x.dtype.element_ty), mask=(s >= 0) & (s < count) & real)
            if d_before is not None:
                kept = d_before + (row * (W - 1) + (W - 1) + s) * D + d
                tl.store(kept, whole.to(d_before.dtype.element_ty), mask=(start == 0) & (s < 0) & real)
            seen = seen[1:] + (now,)
            later = later[1:] + (dz,)
    parts += (row * segments + segment) * (W + 1) * D
    for j in tl.static_range(W + 1):
        tl.store(parts + j * D + d, sums[j], mask=real)
