"""Iterative filling of masked tokens as in MaskGIT (arXiv 2202.04200), for any bidirectional model."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from linattn.generate.sampling import Sampling, probabilities, sample


def schedule(masked: int, steps: int) -> list[int]:
    """Number of tokens still masked after each of ``steps`` steps: ⌊masked · cos(π t / 2 steps)⌋, at least one fewer per step."""
    left, after = masked, []
    for t in range(1, steps + 1):
        left = max(0, min(left - 1, math.floor(masked * math.cos(math.pi * t / (2 * steps))))) if t < steps else 0
        after.append(left)
    return after


@torch.no_grad()
def fill(
    model: Callable[[Tensor], Tensor],
    ids: Tensor,
    masked: Tensor,
    *,
    mask_id: int,
    steps: int = 8,
    sampling: Sampling | None = None,
    noise: float = 4.5,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill in the tokens of ``ids`` [B, T] where ``masked`` [B, T] bool, with equal counts in all rows; returns a new tensor [B, T].

    Each step draws all masked tokens at once, keeps those of highest confidence and masks the others again.

    Args:
        model: ids [B, T] -> logits [B, T, V], in which every token may attend to all others.
        ids: tokens; values where ``masked`` is true are ignored.
        masked: True for tokens to fill in.
        mask_id: the token that stands for a masked one.
        steps: calls of the model.
        sampling: how tokens are drawn; None: from the model's own distribution.
        noise: scale of the random term in the confidence; it falls to 0 with the steps.
        generator: for the random numbers; None: the device's default.

    Raises:
        ValueError: for rows with different numbers of masked tokens and for steps below 1.
    """
    counts = masked.sum(1)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, but came as {steps}")
    if masked.shape != ids.shape or masked.dtype != torch.bool or (counts != counts[:1]).any():
        raise ValueError("masked must be torch.bool of the shape of ids, with as many masked tokens in each row")
    how, total = sampling or Sampling(), int(counts[:1].sum())
    for t, left in enumerate(schedule(total, steps), 1):
        ids = torch.where(masked, mask_id, ids)
        logits = model(ids).flatten(0, 1)  # [B T, V]
        drawn = sample(logits, how, generator)
        likely = (logits.float().log_softmax(-1) if how.temperature == 0 else probabilities(logits, how).log()).gather(1, drawn[:, None])
        gumbel = -torch.empty_like(likely).exponential_(1, generator=generator).log()
        sure = (likely + noise * (1 - t / steps) * gumbel).view_as(masked).masked_fill(~masked, torch.inf)
        ids = torch.where(masked, drawn.view_as(ids), ids)
        masked = torch.zeros_like(masked).scatter(1, sure.argsort(1)[:, :left], True)
    return ids
