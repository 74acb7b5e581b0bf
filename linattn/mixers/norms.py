"""Norms of published models beside those in :mod:`linattn.mixers.parts`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.parts import to_float32
from linattn.ops.norms import rms_norm


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm; on a CPU with gradients and for a weight of another dtype, one own kernel each for forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.eps is None:
            return super().forward(x)
        same = x.dtype == self.weight.dtype  # torch has no kernel for others, as under autocast, and returns the wider dtype
        if same and (x.device.type != "cpu" or not torch.is_grad_enabled() or torch.compiler.is_compiling()):
            return super().forward(x)
        return rms_norm(x, self.weight, eps=self.eps)


class ZeroCenteredRMSNorm(nn.Module):
    """RMS norm over the last axis that keeps its weight's distance w from one: x / √(mean x² + eps) ⊙ (1 + w).

    As in Gemma and Qwen3-Next, where weight decay then pulls towards one. Sums in float32, result in the dtype of x.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, 1 + to_float32(self.weight), eps=self.eps)
