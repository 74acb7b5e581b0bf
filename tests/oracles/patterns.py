"""Attention under a mask built by two loops, in float64: the reference of patterns, with gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.mixers import Mixer
from tests.oracles.compare import distance


def drawn(length: int, sees: Callable[[int, int], bool]) -> Tensor:
    """The mask [T, T] of ``sees(query, key)``."""
    return torch.tensor([[bool(sees(i, j)) for j in range(length)] for i in range(length)]).view(length, length)


def dense(mixer: Mixer, x: Tensor, masks: Tensor, *others: int) -> Tensor:
    """The mixer's projections through softmax over all pairs of ``masks`` [H or 1, T, T], read out."""
    r = mixer.recurrence(x, mixer.begin(x, *others))
    scores = torch.einsum("bthk,bshk->bhts", r.q, r.k) * r.q.shape[-1] ** -0.5
    weights = scores.masked_fill(~masks, -torch.inf).softmax(-1)
    return mixer.read(torch.einsum("bhts,bshv->bthv", weights, r.v), x)


def assert_pattern(mixer: Mixer, x: Tensor, masks: Tensor, *others: int, tolerance: float = 1e-12) -> None:
    """Outputs and gradients of tokens and parameters are those under ``masks`` [H or 1, T, T]."""
    x = x.clone().requires_grad_()
    runs = []
    for y in (mixer(x, *others), dense(mixer, x, masks, *others)):
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
        runs.append([y, *torch.autograd.grad((y * weight).sum(), [x, *mixer.parameters()], materialize_grads=True)])
    for ours, theirs in zip(*runs, strict=True):
        error = (ours - theirs).abs().max().item()
        assert error <= tolerance * (1 + theirs.abs().max().item()), error
    assert distance(runs[0][0], runs[1][0]) < tolerance
