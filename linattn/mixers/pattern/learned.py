"""What learned patterns share: bringing the tokens of a group together, and picking tokens by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Tokens brought together in N chunks: ``places`` [..., N, size] says which tokens a chunk has, -1 for none, ``first`` [..., N] whether
    it is the first chunk of its group, and ``where`` [..., T] where each token stands among the N size places.
    """

    places: Tensor
    first: Tensor
    where: Tensor


def grouped(group: Tensor, count: int, size: int) -> Groups:
    """Bring the tokens of each of ``count`` groups together in chunks of ``size``, in the order of their positions: ``group`` [..., T].

    A chunk is of one group, so that what stands in it hangs on no other group. There are at most T / size + count chunks.
    """
    alike, order = group.contiguous().sort(dim=-1, stable=True)
    rank = torch.arange(group.shape[-1], device=group.device) - torch.searchsorted(alike, alike)  # of a token in its group
    chunks = -(-_sizes(group, count) // size)
    begins = chunks.cumsum(-1) - chunks  # the chunk that each group begins with
    at = (begins.gather(-1, alike) + rank // size) * size + rank % size  # [..., T], in sorted order
    total = group.shape[-1] // size + count
    places = at.new_full((*at.shape[:-1], total * size), -1).scatter(-1, at, order).unflatten(-1, (total, size))
    first = torch.zeros(*at.shape[:-1], total + 1, dtype=torch.bool, device=at.device)
    first = first.scatter(-1, begins.clamp(max=total), torch.ones_like(begins, dtype=torch.bool))[..., :total]
    return Groups(places, first, torch.zeros_like(at).scatter(-1, order, at))


def ranks(group: Tensor, count: int, before: Tensor | None = None) -> Tensor:
    """How many tokens of its own group come before each, ``group`` [..., T]; those of ``before`` [..., S] come before all."""
    alike, order = group.contiguous().sort(dim=-1, stable=True)
    rank = torch.arange(group.shape[-1], device=group.device) - torch.searchsorted(alike, alike)
    rank = torch.zeros_like(rank).scatter(-1, order, rank)
    return rank if before is None else rank + _sizes(before, count).gather(-1, group)


def _sizes(group: Tensor, count: int) -> Tensor:
    """How many tokens each of ``count`` groups has: [..., T] -> [..., count]."""
    none = torch.zeros(*group.shape[:-1], count, dtype=group.dtype, device=group.device)
    return none.scatter_add(-1, group, torch.ones_like(group))


def by_head(x: Tensor) -> Tensor:
    """[B, T, H, K] -> [B, H, T, K]."""
    return x.transpose(1, 2)


def pick(x: Tensor, places: Tensor) -> Tensor:
    """The tokens of x [B, H, T, ...] at ``places`` [B, H, ...], those at -1 arbitrary: [B, H, ..., ...].

    By indexing, whose gradient adds up in one order on every device.
    """
    batch, heads = x.shape[:2]
    shape = (-1, *[1] * (places.ndim - 1))
    row, head = torch.arange(batch, device=x.device).view(shape), torch.arange(heads, device=x.device).view(shape[:-1])
    return x[row, head, places.clamp(min=0)]
