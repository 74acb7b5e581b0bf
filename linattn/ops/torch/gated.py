"""Gates in operations of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, x: Tensor, swish: bool = True) -> Tensor:
    """Compute ``silu(gate) ⊙ x``, or ``sigmoid(gate) ⊙ x`` without ``swish``."""
    return (F.silu(gate) if swish else torch.sigmoid(gate)) * x
