"""Definition of the short convolution, token by token. All other backends are tested against this file."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def short_convolution(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
    """Compute y [B, T, D] from ``x`` [B, T, D], ``before`` [B, W - 1, D], ``weight`` [D, 1, W], ``bias`` [D]."""
    width = weight.shape[2]
    seen = x.new_zeros(x.shape[0], width - 1, x.shape[2]) if before is None else before
    out = [x[:, :0]]
    for t in range(x.shape[1]):
        seen = torch.cat([seen, x[:, t : t + 1]], 1)  # [B, W, D]
        y = (seen * weight[:, 0].t()).sum(1, keepdim=True)
        y = y if bias is None else y + bias
        out.append((F.silu(y) if activation else y).to(x.dtype))
        seen = seen[:, 1:]
    return torch.cat(out, 1)
