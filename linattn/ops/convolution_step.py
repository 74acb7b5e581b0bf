"""A token of the short convolution, with its state moved on in place: what a loop that decodes runs, captured or not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import checks, dispatch, tracing


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
    name = dispatch.choose("auto", _refusal, x, state, weight, bias, size, normed)
    if name == "triton":
        from linattn.ops.triton import convolution_step as kernels

        return kernels.step_(x, state, weight, bias, activation, size, normed, eps, overlapped)
    if name == "cpu":
        from linattn.ops.cpu import steps as native

        return native.convolution(x, state, weight, bias, activation)
    return _portable(x, state, weight, bias, activation, size, normed, eps)


def _portable(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, size: int, normed: int, eps: float
) -> Tensor:  # fmt: skip
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


def _refusal(
    name: str, asked: bool, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, size: int, normed: int
) -> str | None:  # fmt: skip
    if name == "torch":
        return None
    if name == "reference":
        return "the definition is written in operations of torch"
    if tracing.wanted(x, weight, bias):
        return "it has no gradients"
    if name == "triton":
        return dispatch.gpu_refusal(x, asked) or _kernels_refusal(x, state, size)
    if normed:
        return "it divides no heads by their length"
    from linattn.ops.cpu import steps as native

    return native.convolution_refusal(x, state, weight, bias)


def _kernels_refusal(x: Tensor, state: Tensor, size: int) -> str | None:
    if x.dtype == torch.float64:
        return "its sums are float32, and float64 was given"
    if x.stride(2) != 1 or size & (size - 1):
        return "it takes channels side by side, and heads that are powers of two"
    from linattn.ops.triton import convolution_step as kernels

    return kernels.refusal(state)


def _explained(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, size: int, normed: int, **_: Any
) -> dispatch.Explained:  # fmt: skip
    title = f"convolution step on {x.device}, {x.dtype}, {list(x.shape)}"
    return dispatch.Explained(title, x.device, _refusal, (x, state, weight, bias, size, normed))


dispatch.explains(step_, _explained)
