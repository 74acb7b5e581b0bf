"""Products with quantised matrices as operators of torch: exporters and compilers see them, and gradients pass to the vectors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import gpu, tracing
from linattn.ops.linears import linears
from linattn.ops.operator import register
from linattn.ops.torch.quantised import Quantised, dequantised


def linear(x: Tensor, weight: Quantised, bias: Tensor | None = None) -> Tensor:
    """``x Wᵀ + b`` of x [..., K] in the dtype of x, with gradients to x and b; ValueError for another shape, and for integers."""
    rows, columns = weight.shape
    if not x.is_floating_point() or x.shape[-1:] != (columns,):
        raise ValueError(f"x must be floats [..., {columns}] for a matrix [{rows}, {columns}], but came as {x.dtype} {list(x.shape)}")
    if tracing.traced(x) or tracing.wanted(x, bias):
        y: Tensor = LINEAR(x, *weight, bias)
        return y
    return _product(x, *weight, bias)


def rows(weight: Quantised, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``ids`` [...] of a quantised matrix, [..., K]."""
    found: Tensor = ROWS(*weight, ids, dtype)
    return found


def _product(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    return linears(x, [Quantised(codes, scale)], [bias])[0]


def _run(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return _product(x, codes, scale, bias)


def _fake(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs[1:3])


def _gradient(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    d_x = _TRANSPOSED(d_y, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
    return d_x, None, None, d_y.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None


def _run_transposed(d_y: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return F.linear(d_y, dequantised(codes, scale, d_y.dtype).mT)


def _fake_transposed(d_y: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return d_y.new_empty((*d_y.shape[:-1], Quantised(codes, scale).shape[1]))


def _gradient_transposed(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None]:
    return LINEAR(d_x, *ctx.saved_tensors, None), None, None


def _run_rows(codes: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    if ids.numel() and dtype != torch.float64 and gpu.refusal(ids.device) is None:
        from linattn.ops.triton import quantised as kernels

        return kernels.rows(Quantised(codes, scale), ids, dtype)
    return dequantised(codes[ids], scale[ids], dtype)


def _fake_rows(codes: Tensor, scale: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.new_empty((*ids.shape, Quantised(codes, scale).shape[1]), dtype=dtype)


LINEAR = register(
    "quantised_linear", "(Tensor x, Tensor codes, Tensor scale, Tensor? bias) -> Tensor", _run, _fake, gradient=_gradient, keep=_keep
)
_TRANSPOSED = register(
    "quantised_transposed", "(Tensor d_y, Tensor codes, Tensor scale) -> Tensor", _run_transposed, _fake_transposed,
    gradient=_gradient_transposed, keep=_keep,
)  # fmt: skip
ROWS = register("quantised_rows", "(Tensor codes, Tensor scale, Tensor ids, ScalarType dtype) -> Tensor", _run_rows, _fake_rows)
