"""The elementwise recurrences in plain torch: blocks double inside a chunk, a short loop goes from chunk to chunk.

Each is a pair of operations on what lies between two tokens, where logarithms of decays add up: ``fade`` carries a state
over a sum of logarithms, ``join`` puts what came later on top of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.ops.torch.decay import Factor, halves
from linattn.ops.torch.layout import SLAB, Dense, Packed

SIZE = 64
Join = Callable[[Tensor, Tensor, Tensor], Tensor]  # (state, sum of logarithms since it, what came later) -> state


def decayed_sum(h: Tensor, log: Tensor, later: Tensor) -> Tensor:
    """``exp(log) h + later``."""
    return Factor.of(log).apply(h.expand_as(log), later)


def decayed_max(m: Tensor, log: Tensor, later: Tensor) -> Tensor:
    """``max(log + m, later)``."""
    return torch.maximum(log + m, later)


def scan(join: Join, decay: Tensor, x: Tensor, initial: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """``decay`` and ``x`` [B, T, D], ``initial`` [N, D]: every state [B, T, D] and the last of each sequence [N, D]."""
    batch, tokens, _ = x.shape
    if tokens == 0 or initial.shape[0] == 0:
        return x, initial
    slab = max(1, SLAB // (SIZE * x.shape[-1] * batch))
    layout = Dense(tokens, SIZE, slab) if cu_seqlens is None else Packed(cu_seqlens, tokens, SIZE, slab)
    passage = layout.passage(initial[:, None, None])
    nothing = 0.0 if join is decayed_sum else -torch.inf  # what a padding token adds
    outputs = []
    for log, own in zip(layout.split(decay[:, :, None], x.dtype), layout.split(x[:, :, None], x.dtype, nothing), strict=True):
        # [n, B, 1, C, D]
        own, sums = _within(join, log, own), log.cumsum(-2)
        entered = _carry(join, sums[..., -1:, :], own[..., -1:, :], passage)
        outputs.append(join(entered, sums, own))
    return layout.join(outputs)[:, :, 0], passage.final()[:, 0, 0]


def _within(join: Join, log: Tensor, own: Tensor) -> Tensor:
    """Each row's state had its chunk started from nothing: blocks of 2h rows from their halves."""
    h = 1
    while 2 * h <= own.shape[-2]:
        first, second = halves(own, h)
        second = join(first[..., -1:, :], halves(log, h)[1].cumsum(-2), second)
        own, h = torch.stack([first, second], -3).flatten(-4, -2), 2 * h
    return own


def _carry(join: Join, total: Tensor, last: Tensor, passage) -> Tensor:
    """The states before each chunk [n, B, 1, 1, D]."""
    before = []
    for log, own in zip(total.unbind(), last.unbind(), strict=True):
        before.append(passage.enter())
        passage.leave(join(before[-1], log, own))
    return torch.stack(before)
