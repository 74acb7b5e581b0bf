"""Reversible blocks (RevNet, arXiv 1707.04585; Reformer, arXiv 2001.04451, section 3), whose inputs are computed from their outputs.

Two streams x₁, x₂, side by side as [B, T, 2 D]: y₁ = x₁ + mixer(norm(x₂)), y₂ = x₂ + ffn(norm(y₁)). Training saves only
the output of the last block, and the backward pass recomputes each block's input from its output, so that memory does not grow
with depth.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from linattn.ops import sharding


def through(blocks: nn.ModuleList, x: Tensor, **how: Any) -> Tensor:
    """Run reversible ``blocks`` on x [B, T, 2 D] without states, saving no activations between them; ``how``: mask and cu_seqlens."""
    return _Through.apply(x, blocks, how, *(p for block in blocks for p in block.parameters()))


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList, how: dict[str, Any], *_: Tensor) -> Tensor:
        ctx.blocks, ctx.how, device = blocks, how, x.device.type
        ctx.back = sharding.bound(_back)
        ctx.autocast = {"device_type": device, "enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device)}
        for block in blocks:
            x, _, _ = block(x, **how)
        ctx.save_for_backward(x)
        return x.clone()  # a copy, because the backward pass starts from the output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        gradients: list[Tensor | None] = []
        with torch.autocast(**ctx.autocast):
            for block in reversed(ctx.blocks):
                y, grad, own = ctx.back(block, y, grad, ctx.how)
                gradients = own + gradients
        return grad, None, None, *gradients


def _back(block: Any, y: Tensor, grad: Tensor, how: dict[str, Any]) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Compute a block's input, the gradient of it, and those of its parameters, from its output ``y`` and the output's gradient."""
    parameters = list(block.parameters())
    (y1, y2), (d1, d2) = y.chunk(2, -1), grad.chunk(2, -1)
    to_y1, first, f = _of_branch(block.ffn_branch, y1, d2, parameters)
    x2, d1 = y2 - f, d1 + to_y1
    to_x2, second, f = _of_branch(lambda t: block.mixer_branch(t, **how), x2, d1, parameters)
    gradients = [a if b is None else b if a is None else a + b for a, b in zip(first, second, strict=True)]
    return torch.cat([y1 - f, x2], -1), torch.cat([d1, d2 + to_x2], -1), gradients


def _of_branch(branch: Any, x: Tensor, grad: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor | None], Tensor]:
    """Backpropagate ``grad`` through branch(x): gradients of x and of ``parameters`` (None for the other branch's), and branch(x)."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = branch(x)
    known = [p for p in parameters if p.requires_grad]
    to_x, *found = torch.autograd.grad(y, [x, *known], grad.to(y.dtype), allow_unused=True)
    left = iter(found)
    return to_x, [next(left) if p.requires_grad else None for p in parameters], y.detach()
