"""Segments of one process as rows or packed sequences of a call."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from linattn.parallel.layout import Layout


@dataclass(frozen=True)
class Rows:
    """Selected segments of a process for ``batch`` rows of tokens: a single one is not copied, several are packed end to end.

    ``chosen`` are increasing indices into ``layout.local``. The sequences of the call are those of the first row, then of the second.
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
        """Select the segments' tokens of ``t`` [B, T, ...]: [B, T', ...], or packed [1, B T', ...]."""
        if len(self.chosen) < len(self.layout.local) or not self.chosen:
            runs = [t[:, self.layout.local[i].own] for i in self.chosen]
            t = runs[0] if len(runs) == 1 else torch.cat(runs, 1) if runs else t[:, :0]
        return t.flatten(0, 1)[None] if self.packed else t

    def put(self, t: Tensor) -> Tensor:
        """Invert :meth:`take` of all segments."""
        return t[0].unflatten(0, (self.batch, -1)) if self.packed else t

    def cu_seqlens(self, device: torch.device) -> Tensor | None:
        """Boundaries of the packed segments; None if each row is one segment."""
        return self.borders(device) if self.packed else None

    def borders(self, device: torch.device) -> Tensor:
        """Boundaries of the segments of all rows, one behind the other."""
        name = f"rows of {self.batch}: {self.chosen}"
        return self.layout.index(name, lambda: accumulate(self.lengths * self.batch, initial=0), device)

    def states(self, t: Tensor) -> Tensor:
        """Reorder states [segments, B, ...] to the sequences of the call, [rows, ...]."""
        return t.transpose(0, 1).flatten(0, 1)

    def by_segment(self, t: Tensor) -> Tensor:
        """Invert :meth:`states`."""
        return t.unflatten(0, (self.batch, len(self.chosen))).transpose(0, 1)

    def totals(self, t: Tensor) -> Tensor:
        """Sum ``t`` [B, T, ...] over the tokens of each segment, [segments, B, ...]."""
        return torch.stack([t[:, self.layout.local[i].own].sum(1) for i in self.chosen])
