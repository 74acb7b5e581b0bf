"""Shared parts of learned patterns: grouping of tokens, picking tokens by head, and choice of their blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Tokens grouped into N chunks: ``places`` [..., N, size] are the tokens of a chunk, -1 for none, ``first`` [..., N] is true for the
    first chunk of a group, and ``where`` [..., T] is the index of each token among the N size places.
    """

    places: Tensor
    first: Tensor
    where: Tensor


def grouped(group: Tensor, count: int, size: int) -> Groups:
    """Group the tokens of each of ``count`` groups into chunks of ``size``, in the order of their positions: ``group`` [..., T].

    A chunk has tokens of one group and depends on no other group. There are at most T / size + count chunks.
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
    """Number of earlier tokens of each token's own group, ``group`` [..., T]; those of ``before`` [..., S] come before all."""
    alike, order = group.contiguous().sort(dim=-1, stable=True)
    rank = torch.arange(group.shape[-1], device=group.device) - torch.searchsorted(alike, alike)
    rank = torch.zeros_like(rank).scatter(-1, order, rank)
    return rank if before is None else rank + _sizes(before, count).gather(-1, group)


def _sizes(group: Tensor, count: int) -> Tensor:
    """Number of tokens in each of ``count`` groups: [..., T] -> [..., count]."""
    none = torch.zeros(*group.shape[:-1], count, dtype=group.dtype, device=group.device)
    return none.scatter_add(-1, group, torch.ones_like(group))


def by_head(x: Tensor) -> Tensor:
    """Transpose [B, T, H, K] to [B, H, T, K]."""
    return x.transpose(1, 2)


def pick(x: Tensor, places: Tensor) -> Tensor:
    """Pick the tokens of x [B, H, T, ...] at ``places`` [B, H, ...], arbitrary ones at -1: [B, H, ..., ...].

    Uses indexing, whose gradient is summed deterministically on every device.
    """
    batch, heads = x.shape[:2]
    shape = (-1, *[1] * (places.ndim - 1))
    row, head = torch.arange(batch, device=x.device).view(shape), torch.arange(heads, device=x.device).view(shape[:-1])
    return x[row, head, places.clamp(min=0)]


def block_means(x: Tensor, place: Tensor, size: int) -> Tensor:
    """Mean of each block of ``size`` positions, [rows, blocks, ...], of x [rows, slots, ...] at ``place`` [rows, slots], -1 for
    nowhere. An incomplete block has its sum divided by ``size``.
    """
    rows, slots = place.shape
    count = -(-slots // size)
    home = torch.arange(rows, device=x.device)[:, None] * count + place.clamp(min=0) // size
    real = (place >= 0).view(rows, slots, *[1] * (x.ndim - 2))
    total = x.new_zeros(rows * count, *x.shape[2:]).index_put((home.flatten(),), torch.where(real, x, 0.0).flatten(0, 1), accumulate=True)
    return total.unflatten(0, (rows, count)) / size


def best(scores: Tensor, count: int) -> Tensor:
    """Mask of the ``count`` largest of ``scores`` [..., N], all ties with the last of them included, -inf never."""
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.topk(min(count, scores.shape[-1]), -1)[0][..., -1:]
    return (scores >= least) & (scores > -torch.inf)


def in_blocks(chosen: Tensor, place: Tensor, size: int) -> Tensor:
    """Mask of the slots at ``place`` [rows, slots] in the blocks ``chosen`` [rows, H, T, blocks]: [rows, H, T, slots]."""
    home = (place.clamp(min=0) // size)[:, None, None].expand(*chosen.shape[:-1], -1)
    return chosen.gather(-1, home) & (place >= 0)[:, None, None]
