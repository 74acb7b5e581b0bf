"""Attention over tiles, groups of queries with the keys that they may see, for fixed and learned patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.ops.dot_product import dot_product_attention

NOTHING = -1e30  # logarithm of an empty sum: finite, so that differences are not NaN
ALONE = -1e5  # score of a token with itself in shared queries and keys


@dataclass(frozen=True)
class Tiles:
    """G tiles of C queries and M keys, as positions in the sequence, -1 for none; a query is in at most one tile.

    ``queries`` [G, C], ``keys`` [G, M] and ``seen`` [G, C, M] or [B, G, C, M] bool.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Tiles], scale: float) -> Tensor:
    """Compute softmax attention over the keys that a query sees in all ``parts``, which must be disjoint: [B, T, H, V].

    q [B, T, H, K], k [B, S, H, K], v [B, S, H, V]. A query that sees no key gets 0.
    """
    if not q.shape[1]:
        return v
    if not parts:
        return torch.zeros_like(v)
    if len(parts) == 1:
        (tiles,) = parts
        return _back(_fused(q, k, v, tiles, scale), tiles, q.shape[1], 0.0)
    outputs, logs = [], []
    for tiles in parts:
        o, log = _summed(q, k, v, tiles, scale)
        outputs.append(_back(o, tiles, q.shape[1], 0.0))
        logs.append(_back(log, tiles, q.shape[1], NOTHING))
    weights = torch.stack(logs).softmax(0)  # [parts, B, T, H, 1]
    return (weights * torch.stack(outputs)).sum(0).to(v.dtype)


def _gathered(t: Tensor, places: Tensor) -> Tensor:
    """Gather ``t`` [B, T, H, K] at ``places`` [G, C] into [B G, H, C, K]."""
    return t.index_select(1, places.clamp(min=0).flatten()).unflatten(1, places.shape).transpose(2, 3).flatten(0, 1)


def _fused(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Tensor:
    """Compute the attention of each tile separately, [B G, H, C, V]."""
    seen = tiles.seen.expand(q.shape[0], -1, -1, -1).flatten(0, 1)[:, None]  # [B G, 1, C, M]
    none = ~seen.any(-1, keepdim=True)
    q, k, v = _gathered(q, tiles.queries), _gathered(k, tiles.keys), _gathered(v, tiles.keys)
    return dot_product_attention(q, k, v, attn_mask=seen | none, scale=scale).masked_fill(none, 0.0)


def _summed(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> tuple[Tensor, Tensor]:
    """Compute :func:`_fused` and the logarithm of the softmax's denominator, [B G, H, C, 1], :data:`NOTHING` if no key is seen."""
    seen = tiles.seen.expand(q.shape[0], -1, -1, -1).flatten(0, 1)[:, None]
    o, log = summed(scale * _gathered(q, tiles.queries), _gathered(k, tiles.keys), _gathered(v, tiles.keys), seen)
    return o, log[..., None]


def summed(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute attention of q [..., C, K] to k [..., M, K] and v [..., M, V] with mask ``seen`` [..., C, M].

    Returns the output [..., C, V] and the logarithm of the softmax's denominator [..., C], in float32 (float64 for float64): 0 and
    :data:`NOTHING` where nothing is seen. ``own`` [..., C, M] marks keys that are the query itself, whose weight is negligible unless
    no other key is seen.
    """
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    if own is not None:
        scores = torch.where(own, ALONE, scores)
    scores = scores.masked_fill(~seen, NOTHING)
    most = scores.detach().amax(-1, keepdim=True).clamp(min=NOTHING / 2)  # so that weights are 0 where nothing is seen
    weights = (scores - most).exp()
    total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    o = (weights.to(v.dtype) @ v).to(scores.dtype) / total
    return o, torch.where(seen.any(-1), (most + total.log())[..., 0], NOTHING)


def _back(t: Tensor, tiles: Tiles, length: int, absent: float) -> Tensor:
    """Reorder tiles [B G, H, C, X] into the sequence [B, T, H, X]; ``absent`` fills queries that are in no tile."""
    groups, size = tiles.queries.shape
    t = t.unflatten(0, (-1, groups)).transpose(2, 3).flatten(1, 2)  # [B, G C, H, X]
    queries = tiles.queries.flatten()
    place = queries.new_full((length + 1,), groups * size).scatter(0, torch.where(queries < 0, length, queries), _count(queries))[:length]
    return torch.cat([t, t.new_full((t.shape[0], 1, *t.shape[2:]), absent)], 1).index_select(1, place)


def _count(places: Tensor) -> Tensor:
    return torch.arange(places.shape[0], device=places.device)
