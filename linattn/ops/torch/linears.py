"""Linear maps with neighbouring operations, in operations of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def portable(
    x: Tensor, weights: Sequence[Matrix], biases: Biases, norm: Tensor | None, eps: float, size: int, gate: Tensor | None,
    residual: Tensor | None, gated: bool, finish: Finish,
) -> list[Tensor]:  # fmt: skip
    """The definition, in operations of torch."""
    x = normed(x, norm, eps, size, gate)
    products = [F.linear(x, _floats(w, x.dtype), b) for w, b in zip(weights, biases, strict=True)]
    if gated:
        products = [F.silu(products[0]) * products[1]]
    products = products if residual is None else [residual + products[0]]
    return [finished(y, finish[i]) if i < len(finish) else y for i, y in enumerate(products)]


def _floats(weight: Matrix, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantised(*weight, dtype)


def finished(y: Tensor, steps: Steps) -> Tensor:
    """The definition, in operations of torch."""
    y = y.float() if steps and y.dtype != torch.float64 else y
    for name, other in steps:
        y = FINISHES[name](y) if other is None else FINISHES[name](y, other)
    return y


def normed(x: Tensor, norm: Tensor | None, eps: float, size: int, gate: Tensor | None) -> Tensor:
    """Compute ``n(x)`` in the dtype of x."""
    if not size:
        return x
    pieces = x.unflatten(-1, (-1, size))
    pieces = pieces if x.dtype == torch.float64 else pieces.float()
    pieces = pieces * torch.rsqrt(pieces.square().mean(-1, keepdim=True) + eps)
    y = pieces.flatten(-2) if norm is None else pieces.flatten(-2) * norm.flatten().repeat(x.shape[-1] // norm.numel())
    y = y.to(x.dtype)
    return y if gate is None else y * F.silu(gate)
