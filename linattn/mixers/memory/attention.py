"""Shared parts: softmax over few slots, means of neighbours, and attention whose cost is counted while it runs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Mixer, Recurrence
from linattn.ops import flops
from linattn.ops.dot_product import dot_product_attention


class Counted(Mixer):
    """Mixer whose operations in ``attend`` are counted while it runs."""

    def attend_flops(self, r: Recurrence, past: int) -> int:
        with flops.counter() as counter:
            self.attend(r, self.begin(*self.arguments(r.v.flatten(2))))
        return counter.get_total_flops()


class BesideSoftmax(Counted, Softmax):
    """Base with the queries, keys and values of softmax attention over a whole sequence; a subclass combines them in ``attend``.

    No positions: these papers add them to the tokens.
    """

    packs = False

    def __init__(self, dim: int, heads: int, *, bias: bool = False, out_bias: bool = False) -> None:
        super().__init__(dim, heads, rotated=0, causal=False, bias=bias, out_bias=out_bias)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, *, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Softmax attention of q [B, T, H, K] to k [B, S, H, K] and v [B, S, H, V]: [B, T, H, V].

    Args:
        seen: bool, [B, S] or [B, T, S], slots that are visible; a query that sees none gets 0.
        bias: added to the scores, [B or 1, H, T, S].
        scale: of q; K ** -0.5.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if not k.shape[2]:  # zeros, with gradients
        return (q @ k.mT @ v).transpose(1, 2)
    mask = None if bias is None else bias.to(q.dtype)
    if seen is None:
        return dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    seen = seen[:, None, None] if seen.ndim == 2 else seen[:, None]  # [B, 1, T or 1, S]
    none = ~seen.any(-1, keepdim=True)
    mask = seen | none if mask is None else mask.masked_fill(~(seen | none), -torch.inf)
    return dot_product_attention(q, k, v, attn_mask=mask, scale=scale).masked_fill(none, 0.0).transpose(1, 2)


def means(x: Tensor, size: int, counts: Tensor) -> Tensor:
    """Means of every ``size`` tokens of x [B, T, D] among the first ``counts`` [B]: [B, ⌈T / size⌉, D]."""
    number = -(-x.shape[1] // size)
    real = torch.arange(number * size, device=x.device) < counts[:, None]
    groups = F.pad(x, (0, 0, 0, number * size - x.shape[1])) * real[..., None]
    return groups.unflatten(1, (number, size)).sum(2) / real.unflatten(1, (number, size)).sum(2).clamp(min=1)[..., None]


def check_least(least: int, **counts: int) -> None:
    """Raise ValueError for counts below ``least``."""
    for name, value in counts.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, but came as {value}")
