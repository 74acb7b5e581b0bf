"""Definitions of the elementwise recurrences, token by token. All other backends are tested against this file."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def decayed_sum(h: Tensor, decay: Tensor, b: Tensor) -> Tensor:
    return decay.exp() * h + b


def decayed_max(m: Tensor, decay: Tensor, gate: Tensor) -> Tensor:
    return torch.maximum(decay + m, gate)


def scan(step: Step, decay: Tensor, x: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Run ``decay`` and ``x`` [B, T, D] from ``initial`` [N, D]: every state [B, T, D] and the last of each sequence [N, D]."""
    if cu_seqlens is None:
        return _sequence(step, decay, x, initial)
    ends = cu_seqlens.tolist()
    spans = list(zip(ends[:-1], ends[1:], strict=True))
    runs = [_sequence(step, decay[:, a:b], x[:, a:b], initial[n : n + 1]) for n, (a, b) in enumerate(spans)]
    return torch.cat([x[:, :0]] + [h for h, _ in runs], 1), torch.cat([initial[:0]] + [last for _, last in runs])


def _sequence(step: Step, decay: Tensor, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    states = [x[:, :0]]
    for t in range(x.shape[1]):
        h = step(h, decay[:, t], x[:, t])
        states.append(h[:, None])
    return torch.cat(states, 1), h
