"""A token of the short convolution, with its state moved on in place: what a loop that decodes runs, captured or not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import checks, gpu, tracing


def _takes(x: Tensor) -> bool:
    return x.is_cuda and gpu.refusal(x.device) is None


def step_(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, size: int = 0, normed: int = 0, eps: float = 0.0,
    overlapped: bool = False,
) -> Tensor:  # fmt: skip
    """``silu(bias + Σ_i weight_i x_i)`` over the last of ``state`` [B, S, D] and ``x`` [B, 1, D], the next of them. It forgets its first.

    ``weight`` is [D, 1, W], W at least 2 and at most S + 1; the first ``normed`` channels, in heads of ``size``, are divided by
    √(Σ y² + eps). [B, 1, D].

    ``overlapped``: on Hopper the state is read while the launches before may still run, for who knows that none of them writes to it.
    """
    batch, slots, width = state.shape
    if x.shape != (batch, 1, width) or weight.shape[:2] != (width, 1) or not 2 <= weight.shape[2] <= slots + 1:
        raise ValueError(f"x, state and weight must be [B, 1, D], [B, S, D] and [D, 1, W] with W of 2 to S + 1, but came with "
                         f"{list(x.shape)}, {list(state.shape)} and {list(weight.shape)}")  # fmt: skip
    if bias is not None and bias.shape != (width,):
        checks.shape("bias", bias, "[D]", (width,))
    wanted = tracing.wanted(x, weight, bias)
    if not wanted and _takes(x) and x.dtype != torch.float64 and x.stride(2) == 1 and size & (size - 1) == 0:
        from linattn.ops.triton import convolution_step as kernels

        if kernels.refusal(state) is None:
            return kernels.step_(x, state, weight, bias, activation, size, normed, eps, overlapped)
    if not wanted and not normed and x.device.type == "cpu":
        from linattn.ops.cpu import steps as native

        if native.convolution_refusal(x, state, weight, bias) is None:
            return native.convolution(x, state, weight, bias, activation)
    tokens = torch.cat([state, x], 1)
    state.copy_(tokens[:, 1:])
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    y = (tokens[:, -weight.shape[2] :].to(wide) * weight[:, 0].t().to(wide)).sum(1, keepdim=True)
    y = y if bias is None else y + bias
    y = F.silu(y) if activation else y
    if normed:
        heads = y[..., :normed].unflatten(-1, (-1, size))
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + eps)
        y = torch.cat([heads.flatten(-2), y[..., normed:]], -1)
    return y.to(x.dtype)
