"""SwiGLU (arXiv 2002.05202, section 2): y = (silu(x W) ⊙ x V) U, without biases."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """[.., D] -> [.., D] through ``hidden`` gated channels; by default 8/3 of D, rounded up to a multiple of 32."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = -(-8 * dim // 96) * 32 if hidden is None else hidden
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
