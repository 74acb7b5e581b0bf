"""Norms over the last axis on a GPU: kernels over whole rows, forward and backward, saving only the inputs.

Tensors are [M, H, V]. A row is read once, its sum is float32, and results are rounded once. Gradients of a weight are summed over
the rows of a program and then over programs, in an order that depends only on shapes.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops.torch.norms import norm as portable
from linattn.ops.triton import fitting, launch
from linattn.ops.triton.recurrences import LOG2E, _exp2

LARGEST = 8192  # V
NUMBERS = 2048  # elements of a tile
TILES = 8  # tiles of a program in backward


class Shape(NamedTuple):
    """Constants of a kernel."""

    H: int
    V: int
    RB: int  # rows of a tile
    VB: int  # channels of a tile
    EACH: bool  # weights per head, one head per program
    MEAN: bool  # the sum is divided by V


@triton.jit
def _rows(tile, M, shape: tl.constexpr):
    """Indices of M and H for each row of a tile, as columns, its channels, and the mask."""
    row, v = (tile * shape.RB + tl.arange(0, shape.RB))[:, None], tl.arange(0, shape.VB)[None, :]
    m, h = row // shape.H, row % shape.H
    if shape.EACH:
        m, h = row, tl.program_id(1) + row * 0
    there = m < M
    return m.to(tl.int64), h, v, there if shape.V == shape.VB else there & (v < shape.V)


@triton.jit
def _numbers(t, m, h, v, there, t_m, t_h):
    return tl.load(t + m * t_m + h * t_h + v, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x, real, eps, shape: tl.constexpr):
    """``x`` divided by its length, and the inverse of the length; rows that are not ``real`` have length 1, because eps may be 0."""
    total = tl.sum(x * x, 1)[:, None]
    if shape.MEAN:
        total = total / shape.V
    inverse = 1.0 / tl.sqrt_rn(tl.where(real, total + eps, 1.0))
    return x * inverse, inverse


@triton.jit(do_not_specialize=["M"])
def forward_kernel(x, weight, gate, y, M, x_m, x_h, g_m, g_h, eps, shape: tl.constexpr, OVERLAPPED: tl.constexpr):
    """OVERLAPPED: the weight is read while the previous launch may still run, and the next launch may start at once."""
    H: tl.constexpr = shape.H
    V: tl.constexpr = shape.V
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    m, h, v, there = _rows(tl.program_id(0), M, shape)
    if weight is not None:
        scale = tl.load(weight + (h * V + v if shape.EACH else v), mask=v < V, other=0.0).to(tl.float32)
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    normed, _ = _scaled(_numbers(x, m, h, v, there, x_m, x_h), m < M, eps, shape)
    if weight is not None:
        normed *= scale
    if gate is not None:
        g = _numbers(gate, m, h, v, there, g_m, g_h)
        normed *= g / (1.0 + _exp2(-g * LOG2E))
    tl.store(y + (m * H + h) * V + v, normed.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["M"])
def backward_kernel(
    x, weight, gate, d_y, d_x, d_gate, parts, M, x_m, x_h, g_m, g_h, y_m, y_h, eps, shape: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """``parts`` [programs, heads with EACH, else 1, V]: the weight's gradient."""
    H: tl.constexpr = shape.H
    V: tl.constexpr = shape.V
    VB: tl.constexpr = shape.VB
    total = tl.zeros([VB], tl.float32)
    for i in range(TILES):
        m, h, v, there = _rows(tl.program_id(0) * TILES + i, M, shape)
        normed, inverse = _scaled(_numbers(x, m, h, v, there, x_m, x_h), m < M, eps, shape)
        dy = _numbers(d_y, m, h, v, there, y_m, y_h)
        scale = tl.full([1, 1], 1.0, tl.float32)
        if weight is not None:
            scale = tl.load(weight + (h * V + v if shape.EACH else v), mask=v < V, other=0.0).to(tl.float32)
        if gate is not None:
            g = _numbers(gate, m, h, v, there, g_m, g_h)
            s = 1.0 / (1.0 + _exp2(-g * LOG2E))
            of_gate = dy * normed * scale * s * (1.0 + g * (1.0 - s))
            tl.store(d_gate + (m * H + h) * V + v, of_gate.to(d_gate.dtype.element_ty), mask=there)
            dy *= g * s
        if weight is not None:
            total += tl.sum(dy * normed, 0)
        dy *= scale
        along = tl.sum(dy * normed, 1)[:, None]
        if shape.MEAN:
            along = along / V
        of_x = inverse * (dy - normed * along)
        tl.store(d_x + (m * H + h) * V + v, of_x.to(d_x.dtype.element_ty), mask=there)
    if weight is not None:
        c = tl.arange(0, VB)
        tl.store(parts + (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * V + c, total, mask=c < V)


def refusal(x: Tensor, weight: Tensor | None, gate: Tensor | None, dtype: torch.dtype) -> str | None:
    """Reason why the kernels do not run the call, or None if they do."""
    if torch.float64 in (dtype, *(t.dtype for t in (x, weight, gate) if t is not None)):
        return "its sums are float32, and float64 was given"
    if x.ndim < 2 or not x.numel() or x.shape[-1] > LARGEST:
        return f"it takes [..., V] of at most {LARGEST} channels, but x has shape {list(x.shape)}"
    return fitting.refusal(fitting.alike("norm", x))


def _portable(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, dtype: torch.dtype, **_: bool) -> Tensor:
    return portable(x, weight, gate, eps, mean, dtype)


def _portable_backward(d_y: Tensor, x: Tensor, weight: Tensor | None, gate: Tensor | None, *options: Any) -> tuple[Tensor | None, ...]:
    return tuple(fitting.differentiated(lambda *tensors: (_portable(*tensors, *options),), (x, weight, gate), (d_y,)))


@fitting.or_else(_portable, lambda x, *_, **__: fitting.alike("norm", x))
def forward(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, dtype: torch.dtype, *, overlapped: bool = False
) -> Tensor:
    """``overlapped``: on Hopper, if no earlier launch since the last one that waited for all others writes to ``weight``."""
    tensors = (_three(x), None if weight is None else weight.contiguous(), None if gate is None else _three(gate))
    (y,) = launch.run(_forward, x, tensors, eps, mean, dtype, overlapped)
    return y.view(x.shape)


@fitting.or_else(_portable_backward, lambda _, x, *__: fitting.alike("norm", x))
def backward(
    d_y: Tensor, x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """Gradients of ``x``, ``weight`` and ``gate``, each None if the input is None."""
    tensors = (_three(x), None if weight is None else weight.contiguous(), None if gate is None else _three(gate), _three(d_y))
    d_x, d_gate, parts = launch.run(_backward, x, tensors, eps, mean)
    d_weight = None if weight is None else parts.sum(0).view(weight.shape).to(weight.dtype)
    return d_x.view(x.shape), d_weight, None if gate is None else d_gate.view(x.shape)


def outputs(x: Tensor, *options: Any) -> Tensor:
    """The result of :func:`forward` without memory."""
    return x.new_empty(x.shape, dtype=options[-1])


def gradients(_: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Empty gradients, as :func:`backward` returns them."""
    return tuple(None if t is None else t.new_empty(t.shape) for t in arguments[:3])


def _three(t: Tensor) -> Tensor:
    """[..., H, V] as [M, H, V] with contiguous channels, without a copy where strides allow it."""
    shape = (prod(t.shape[:-2]), *t.shape[-2:])
    even = all(t.stride(i) == t.stride(i + 1) * t.shape[i + 1] for i in range(t.ndim - 3))
    return (t if even and t.stride(-1) == 1 else t.contiguous()).view(shape)


def _forward(
    recorder: launch.Recorder,
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    eps: float,
    mean: bool,
    dtype: torch.dtype,
    overlapped: bool,
) -> launch.Tensors:
    y = recorder.empty(*x.shape, dtype=dtype)
    numbers = (*_strides(x), *((0, 0) if gate is None else _strides(gate)), eps)
    overlap = {"OVERLAPPED": overlapped, **({"launch_pdl": True} if overlapped else {})}
    _launch(recorder, forward_kernel, 1, mean, (x, weight, gate, y), numbers, **overlap)
    return (y,)


def _backward(
    recorder: launch.Recorder, x: Tensor, weight: Tensor | None, gate: Tensor | None, d_y: Tensor, eps: float, mean: bool
) -> launch.Tensors:
    d_x = recorder.empty(*x.shape, dtype=x.dtype)
    d_gate = None if gate is None else recorder.empty(*gate.shape, dtype=gate.dtype)
    each, tile = _each(weight), _tile(x)
    parts = None
    if weight is not None:
        rows = triton.cdiv(x.shape[0] * (1 if each else x.shape[1]), tile * TILES)
        parts = recorder.empty(rows, *weight.shape, dtype=torch.float32)
    numbers = (*_strides(x), *((0, 0) if gate is None else _strides(gate)), *_strides(d_y), eps)
    tensors = (x, weight, gate, d_y, d_x, d_gate, parts)
    _launch(recorder, backward_kernel, TILES, mean, tensors, numbers, TILES=TILES)
    return d_x, d_gate, parts


def _strides(t: Tensor) -> tuple[int, int]:
    return t.stride(0), t.stride(1)


def _each(weight: Tensor | None) -> bool:
    return weight is not None and weight.ndim == 2


def _tile(x: Tensor) -> int:
    """Rows of a tile."""
    return max(1, NUMBERS // triton.next_power_of_2(x.shape[2]))


def _launch(
    recorder: launch.Recorder, kernel: Any, tiles: int, mean: bool, tensors: launch.Tensors, numbers: tuple[int | float, ...],
    **constants: Any,
) -> None:  # fmt: skip
    """Launch over ``tiles`` tiles a program of the first of ``tensors``, x, whose second is the weight."""
    x, weight = tensors[:2]
    assert x is not None
    count, heads, size = x.shape
    each, tile = _each(weight), _tile(x)
    grid = (triton.cdiv(count * (1 if each else heads), tile * tiles), heads if each else 1, 1)
    recorder.launch(
        kernel, grid, tensors, (count, *numbers), shape=Shape(heads, size, tile, triton.next_power_of_2(size), each, mean),
        num_warps=4 if size <= 4096 else 8, **constants,
    )  # fmt: skip
