"""Decoding step of the short convolution in operations of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def step_(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, size: int, normed: int, eps: float, _: bool
) -> Tensor:  # fmt: skip
    """Run :func:`linattn.ops.convolution_step.step_`."""
    tokens = torch.cat([state, x], 1)
    state.copy_(tokens[:, 1:])
    compute_dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    y = (tokens[:, -weight.shape[2] :].to(compute_dtype) * weight[:, 0].t().to(compute_dtype)).sum(1, keepdim=True)
    y = y if bias is None else y + bias
    y = F.silu(y) if activation else y
    if normed:
        heads = y[..., :normed].unflatten(-1, (-1, size))
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + eps)
        y = torch.cat([heads.flatten(-2), y[..., normed:]], -1)
    return y.to(x.dtype)
