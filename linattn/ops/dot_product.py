"""Softmax attention by torch, also where derivatives are taken in forward mode."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from linattn.ops import tracing


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call torch's ``scaled_dot_product_attention``; in forward mode without its fused kernels, which have no such derivatives."""
    if not tracing.forward_mode():
        return F.scaled_dot_product_attention(q, k, v, **options)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)
