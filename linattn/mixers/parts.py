"""Parts that papers share: short convolution, norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.carry import Carry


def wide(t: Tensor) -> Tensor:
    """``t`` in the dtype of gates, norms and states: float64 stays, everything else becomes float32."""
    return t if t.dtype == torch.float64 else t.float()


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over time; ``name`` is its place in the mixer's state ([rows, width - 1, D])."""

    def __init__(self, dim: int, width: int = 4, *, name: str, bias: bool = False, activation: bool = True) -> None:
        super().__init__()
        self.width, self.name, self.activation = width, name, activation
        self.weight = nn.Parameter(torch.empty(dim, 1, width).uniform_(-(width**-0.5), width**-0.5))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        """[B, T, D] -> [B, T, D]; SiLU after it unless ``activation`` is false."""
        longer, places = carry.context(self.name, x, self.width - 1)
        y = F.conv1d(longer.mT, self.weight, self.bias, groups=x.shape[-1]).mT
        y = y if places is None else y.index_select(1, places - (self.width - 1))
        return F.silu(y) if self.activation else y


class HeadNorm(nn.Module):
    """RMS norm over each head's V channels: [B, T, H, V] -> [B, T, H, V]. Sums in float32, result in the input's dtype."""

    def __init__(self, size: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None

    def forward(self, o: Tensor) -> Tensor:
        x = wide(o)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (normed if self.weight is None else normed * self.weight).to(o.dtype)
