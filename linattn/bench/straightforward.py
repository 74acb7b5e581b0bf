"""Straightforward PyTorch recurrences: chunks of 64 tokens, a loop that carries the state from chunk to chunk.

Each takes the inputs of :func:`linattn.bench.peers.inputs` and returns [B, T, H, D]. L: chunks, C: tokens of a chunk, S: of a part of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

C, S = 64, 16


def _chunks(x: Tensor) -> Tensor:
    """Reshape [1, T, H, ...] to [H, L, C, ...], padded with zeros."""
    x = F.pad(x[0].transpose(0, 1), (0, 0) * (x.ndim - 3) + (0, -x.shape[1] % C)) if x.ndim == 4 else F.pad(x[0].T, (0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C))


def _whole(o: Tensor, tokens: int) -> Tensor:
    return o.flatten(1, 2)[:, :tokens].transpose(0, 1)[None]


def _carried(q: Tensor, kv: Tensor, left: Tensor) -> Tensor:
    """Output of q [H, L, C, K] from the states before its chunks, each the last one times ``left`` [H, L, K or 1], plus kv."""
    state, outputs = torch.zeros_like(kv[:, 0]), []
    for q_n, kv_n, left_n in zip(q.unbind(1), kv.unbind(1), left.unbind(1), strict=True):
        outputs.append(q_n @ state.to(q.dtype))
        state = left_n[..., None].to(state.dtype) * state + kv_n
    return torch.stack(outputs, 1)


def plain(x: dict[str, Tensor]) -> Tensor:
    """Recurrence without decay: the states are a running sum."""
    q, k, v = (_chunks(x[name]) for name in "qkv")
    q = q * q.shape[-1] ** -0.5
    states = (k.transpose(-1, -2) @ v).float().cumsum(1)
    before = F.pad(states[:, :-1], (0, 0, 0, 0, 1, 0)).to(q.dtype)
    return _whole((q @ k.transpose(-1, -2)).tril() @ v + q @ before, x["v"].shape[1])


def head(x: dict[str, Tensor]) -> Tensor:
    """Recurrence with a decay per head (RetNet's chunkwise form, with decays that depend on the tokens)."""
    q, k, v, d = (_chunks(x[name]) for name in ("q", "k", "v", "decay"))
    q, g = q * q.shape[-1] ** -0.5, d.cumsum(-1)
    between = (g[..., :, None] - g[..., None, :]).masked_fill(torch.ones(C, C, dtype=torch.bool).triu(1), -torch.inf).exp().to(q.dtype)
    kv = (k * (g[..., -1:] - g).exp()[..., None].to(k.dtype)).transpose(-1, -2) @ v
    read = _carried(q * g.exp()[..., None].to(q.dtype), kv, g[..., -1:].exp())
    return _whole(((q @ k.transpose(-1, -2)) * between) @ v + read, x["v"].shape[1])


def channel(x: dict[str, Tensor]) -> Tensor:
    """Recurrence with a decay per channel (GLA): between parts of 16 tokens via the later part's start, within one pair by pair."""
    q, k, v, d = (_chunks(x[name]) for name in ("q", "k", "v", "channel"))
    q, g = q * q.shape[-1] ** -0.5, d.cumsum(-2)
    scores = q.new_zeros(*q.shape[:3], C)
    later = torch.ones(S, S, dtype=torch.bool).triu(1)[..., None]
    for start in range(0, C, S):
        own = slice(start, start + S)
        inside = (g[..., own, None, :] - g[..., None, own, :]).masked_fill(later, -torch.inf).exp().to(q.dtype)
        scores[..., own, own] = torch.einsum("...ik,...jk,...ijk->...ij", q[..., own, :], k[..., own, :], inside)
        if start:
            border = g[..., start - 1, None, :]
            since = k[..., :start, :] * (border - g[..., :start, :]).exp().to(k.dtype)
            scores[..., own, :start] = (q[..., own, :] * (g[..., own, :] - border).exp().to(q.dtype)) @ since.transpose(-1, -2)
    kv = (k * (g[..., -1:, :] - g).exp().to(k.dtype)).transpose(-1, -2) @ v
    read = _carried(q * g.exp().to(q.dtype), kv, g[..., -1, :].exp())
    return _whole(scores @ v + read, x["v"].shape[1])
