"""SLAB's Progressive Re-parameterised BatchNorm (arXiv 2405.11582): a layer norm that becomes a batch norm and is folded."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class RepBN(nn.Module):
    """BN(x) + α x over the channels of x [.., D] (equation 5): statistics of all tokens together, α one learned number."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.bn = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x.reshape(-1, x.shape[-1])).view(x.shape) + self.alpha * x

    def affine(self) -> tuple[Tensor, Tensor]:
        """Affine map outside of training: (a, c) with RepBN(x) = a ⊙ x + c, each [D]."""
        bn, mean, variance = self.bn, cast(Tensor, self.bn.running_mean), cast(Tensor, self.bn.running_var)
        factor = bn.weight * (variance + bn.eps).rsqrt()
        return factor + self.alpha, bn.bias - mean * factor


class PRepBN(nn.Module):
    """λ LN(x) + (1 - λ) RepBN(x), [.., D] -> [.., D], where λ falls from 1 to 0 with the steps of training (equation 4).

    The batch norm gathers statistics from the first call on, in the warm-up too (the authors' begins after it). In evaluation it
    is RepBN alone after any number of steps: evaluate when the ``steps`` are over. Then :func:`folded`
    removes it. Parameters and counters have the names of the authors' code.

    Args:
        dim: number of channels D.
        steps: calls in training over which λ falls.
        warmup: calls in training before that, with λ = 1.
        eps: added to the variance in the layer norm; the batch norm adds torch's 1e-5.
    """

    warm: Tensor
    iter: Tensor
    total_step: Tensor

    def __init__(self, dim: int, *, steps: int = 300_000, warmup: int = 0, eps: float = 1e-5) -> None:
        super().__init__()
        for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, but came as {value}")
        self.register_buffer("warm", torch.tensor(warmup))
        self.register_buffer("iter", torch.tensor(steps))  # remaining steps
        self.register_buffer("total_step", torch.tensor(steps))
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.norm2 = RepBN(dim)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.norm2(x)
        share = (self.iter / self.total_step).to(x.dtype)  # λ; a tensor, to avoid synchronisation
        y = share * self.norm1(x) + (1 - share) * self.norm2(x)
        self.iter -= ((self.warm == 0) & (self.iter > 0)).long()
        self.warm -= (self.warm > 0).long()
        return y


def folded(norm: PRepBN, linear: nn.Linear) -> nn.Linear:
    """Fold into one linear map equal to ``linear(norm(x))`` outside of training: W diag(a) and b + W c (section 3.2)."""
    a, c = norm.norm2.affine()
    one = nn.Linear(linear.in_features, linear.out_features, device=linear.weight.device, dtype=linear.weight.dtype)
    with torch.no_grad():
        one.weight.copy_(linear.weight * a)
        one.bias.copy_(linear.weight @ c + (0 if linear.bias is None else linear.bias))
    return one
