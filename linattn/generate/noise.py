"""Random numbers of sampled tokens by position, so that rows may be at different positions and draws are repeatable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.generate.sampling import drawn, greedy


@dataclass(frozen=True)
class Rule:
    """Rule by which tokens follow from logits [n, V]: the most likely ones, or drawn from ``probabilities(logits)`` [n, V] float32.

    ``generator`` None is torch's default generator.
    """

    probabilities: Callable[[Tensor], Tensor] | None = None
    generator: torch.Generator | None = None

    def tokens(self, logits: Tensor, noise: Tensor | None) -> Tensor:
        """Tokens [n] int64 of ``logits`` [n, V]; ``noise`` [n, V], None for greedy decoding."""
        if self.probabilities is None or noise is None:
            return greedy(logits)
        return drawn(self.probabilities(logits), noise)


class Noise:
    """Noise of each position, [rows, V] for the V tokens of ``model``, drawn in the order of positions as plain decoding does.

    A token depends only on the logits and the noise of its position, so accepting or rejecting a draft changes no later random
    number: a seed gives the tokens of plain decoding, and every token has the distribution of the model.
    """

    def __init__(self, rows: int, model: Any, generator: torch.Generator | None) -> None:
        self.like = torch.empty(rows, model.lm_head.out_features, dtype=torch.float32, device=model.device)
        self._generator = generator
        self._first, self._drawn = 0, deque[Tensor]()

    def at(self, places: Sequence[tuple[int, int]]) -> Tensor:
        """Noise [n, V] of ``places``: pairs of a row and a position that has not been dropped."""
        while self._first + len(self._drawn) <= max(position for _, position in places):
            self._drawn.append(torch.empty_like(self.like).exponential_(1, generator=self._generator))
        return torch.stack([self._drawn[position - self._first][row] for row, position in places])

    def drop(self, before: int) -> None:
        """Drop the noise of positions before ``before``, which no row needs any more."""
        while self._first < before and self._drawn:
            self._drawn.popleft()
            self._first += 1


def noise_of(rule: Rule, rows: int, model: Any) -> Noise | None:
    """Noise for ``rows`` sequences of ``model``; None if none is needed."""
    return None if rule.probabilities is None else Noise(rows, model, rule.generator)
