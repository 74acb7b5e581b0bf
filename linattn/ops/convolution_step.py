"""A token of the short convolution, with its state moved on in place: what a captured step runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _takes(x: Tensor) -> bool:
    return x.is_cuda


def step_(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, size: int = 0, normed: int = 0, eps: float = 0.0
) -> Tensor:
    """``silu(bias + Σ_i weight_i x_i)`` over ``state`` [B, W - 1, D] and ``x`` [B, 1, D], the next of its tokens. It forgets its first one.

    ``weight`` is [D, 1, W], W at least 2; the first ``normed`` channels, in heads of ``size``, are divided by √(Σ y² + eps). [B, 1, D].
    """
    if _takes(x) and x.dtype != torch.float64 and x.stride(2) == 1 and size & (size - 1) == 0:
        from linattn.ops.triton import convolution_step as gpu

        return gpu.step_(x, state, weight, bias, activation, size, normed, eps)
    tokens = torch.cat([state, x], 1)
    state.copy_(tokens[:, 1:])
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    y = (tokens.to(wide) * weight[:, 0].t().to(wide)).sum(1, keepdim=True)
    y = y if bias is None else y + bias
    y = F.silu(y) if activation else y
    if normed:
        heads = y[..., :normed].unflatten(-1, (-1, size))
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + eps)
        y = torch.cat([heads.flatten(-2), y[..., normed:]], -1)
    return y.to(x.dtype)
