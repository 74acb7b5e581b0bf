"""Linear maps with neighbouring operations, in operations of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.torch.quantised import Quantised, dequantised

Matrix = Tensor | Quantised
Biases = Sequence[Tensor | None]
Steps = Sequence[tuple[str, float | Tensor | None]]  # names of elementwise operations with their operands, in order
Finish = Sequence[Steps]  # for each product
FINISHES: dict[str, Callable[..., Tensor]] = {
    "log_sigmoid": F.logsigmoid, "softplus": F.softplus, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "exp": torch.exp, "neg": torch.neg,
    "add": torch.add, "mul": torch.mul, "div": torch.div,
}  # fmt: skip


class Norm(NamedTuple):
    """RMS norm of each ``size`` neighbours of the K channels of a vector, and the gate behind it."""

    weight: Tensor | None  # [size] or [K]; None: ones
    eps: float  # added to the mean square
    size: int
    gate: Tensor | None = None  # [..., K]; the result is multiplied by its SiLU


def portable(
    x: Tensor, weights: Sequence[Matrix], biases: Biases, norm: Norm | None, residual: Tensor | None, gated: bool, finish: Finish
) -> list[Tensor]:
    """Compute :func:`linattn.ops.linears.linears` in operations of torch."""
    x = x if norm is None else normed(x, norm)
    products = [F.linear(x, _floats(w, x.dtype), b) for w, b in zip(weights, biases, strict=True)]
    if gated:
        products = [F.silu(products[0]) * products[1]]
    products = products if residual is None else [residual + products[0]]
    return [finished(y, finish[i]) if i < len(finish) else y for i, y in enumerate(products)]


def _floats(weight: Matrix, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantised(*weight, dtype)


def finished(y: Tensor, steps: Steps) -> Tensor:
    """Compute :func:`linattn.ops.linears.stepped` in operations of torch."""
    y = y.float() if steps and y.dtype != torch.float64 else y
    for name, other in steps:
        y = FINISHES[name](y) if other is None else FINISHES[name](y, other)
    return y


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Apply ``norm`` to ``x`` [..., K], in the dtype of x."""
    weight, eps, size, gate = norm
    pieces = x.unflatten(-1, (-1, size))
    pieces = pieces if x.dtype == torch.float64 else pieces.float()
    pieces = pieces * torch.rsqrt(pieces.square().mean(-1, keepdim=True) + eps)
    y = pieces.flatten(-2) if weight is None else pieces.flatten(-2) * weight.flatten().repeat(x.shape[-1] // weight.numel())
    y = y.to(x.dtype)
    return y if gate is None else y * F.silu(gate)
