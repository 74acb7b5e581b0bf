"""Segments of one process as the rows, or the packed sequences, of an operation's call."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from linattn.parallel.layout import Layout


@dataclass(frozen=True)
class Rows:
    """Some segments of a process for ``batch`` rows of tokens: one segment stays as it is, several are packed end to end.

    ``chosen`` are places in ``layout.local``, rising. The call's sequences are those of the first row, then of the second.
    """

    layout: Layout
    chosen: tuple[int, ...]
    batch: int

    @property
    def packed(self) -> bool:
        return len(self.chosen) > 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment."""
        return [self.layout.local[i].length for i in self.chosen]

    def take(self, t: Tensor) -> Tensor:
        """The tokens of [B, T, ...]: [B, T', ...], or packed [1, B T', ...]."""
        if len(self.chosen) < len(self.layout.local) or not self.chosen:
            runs = [t[:, self.layout.local[i].own] for i in self.chosen]
            t = runs[0] if len(runs) == 1 else torch.cat(runs, 1) if runs else t[:, :0]
        return t.flatten(0, 1)[None] if self.packed else t

    def put(self, t: Tensor) -> Tensor:
        """Undo :meth:`take` of all segments."""
        return t[0].unflatten(0, (self.batch, -1)) if self.packed else t

    def cu_seqlens(self, device: torch.device) -> Tensor | None:
        """Borders of the packed segments; None if there is one a row."""
        if not self.packed:
            return None
        name = f"rows of {self.batch}: {self.chosen}"
        return self.layout.index(name, lambda: accumulate(self.lengths * self.batch, initial=0), device)

    def states(self, t: Tensor) -> Tensor:
        """States [segments, B, ...] in the order of the call, [rows, ...]."""
        return t.transpose(0, 1).flatten(0, 1)

    def by_segment(self, t: Tensor) -> Tensor:
        """Undo :meth:`states`."""
        return t.unflatten(0, (self.batch, len(self.chosen))).transpose(0, 1)

    def totals(self, t: Tensor) -> Tensor:
        """Sums of [B, T, ...] over the tokens of each segment, [segments, B, ...]."""
        return torch.stack([t[:, self.layout.local[i].own].sum(1) for i in self.chosen])
