"""Softmax attention by torch, in whatever way of its that has the derivatives that are asked for."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from linattn.ops import tracing


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call ``scaled_dot_product_attention`` of torch, whose fused kernels have no derivatives in forward mode: there, without them."""
    if not tracing.forward_mode():
        return F.scaled_dot_product_attention(q, k, v, **options)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)
