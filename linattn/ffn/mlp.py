"""The feed-forward of vision transformers (arXiv 2010.11929): y = GELU(x W₁ + b₁) W₂ + b₂."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """[.., D] -> [.., D] through ``hidden`` channels; by default 4 D."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = 4 * dim if hidden is None else hidden
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))
