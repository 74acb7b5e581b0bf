"""Softmax attention with gathered keys and values: each process keeps its queries and attends to the keys of all processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from linattn.parallel.collectives import tie
from linattn.parallel.layout import Layout

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of q, k, v and a mask that broadcasts to [B, H, queries, keys]


def attend(layout: Layout, q: Tensor, k: Tensor, v: Tensor, causal: bool, attention: Attention) -> Tensor:
    """Attention of this process's queries q [B, T, H, K] to all keys and values of their sequences, [B, T, H, V].

    ``k`` and ``v`` [B, T, Hk, ...] are this process's; ``attention`` runs each segment's queries on the keys that it may see.
    """
    both = layout.gather(torch.cat([k, v], -1), 1)
    parts = []
    for s in layout.local:
        first, last = layout.borders[s.sequence], s.stop if causal else layout.borders[s.sequence + 1]
        keys, values = both[:, first:last].split([k.shape[-1], v.shape[-1]], -1)
        seen = causal_lower_right(s.length, last - first) if causal else q.new_ones(1, last - first, dtype=torch.bool)
        parts.append(attention(q[:, s.own], keys, values, seen))
    return tie(torch.cat(parts, 1) if parts else q[..., :1].expand(*q.shape[:3], v.shape[-1]), both)
