"""Norms over a head's channels in operations of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, dtype: torch.dtype) -> Tensor:
    """Compute the definition by the ``mean`` or the sum of the squares."""
    numbers = x if x.dtype == torch.float64 else x.float()
    squares = numbers.square()
    y = numbers * torch.rsqrt((squares.mean(-1, keepdim=True) if mean else squares.sum(-1, keepdim=True)) + eps)
    y = y if weight is None else y * weight
    return y.to(dtype) if gate is None else y.to(x.dtype) * F.silu(gate)
