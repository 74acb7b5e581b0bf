"""Feature maps: what stands in for the exponential of q·k, one side of it at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1 of the Linear Transformer (arXiv 2006.16236): x + 1 above zero and eˣ below, where it keeps every digit."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
