"""Packing of a state's rows: one tensor of bytes holds the state of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.ops.gpu import on_gpu
from linattn.state import State

ALIGNED = 16  # bytes


@dataclass(frozen=True)
class Packed:
    """State of one row as read-only ``bytes`` [n]."""

    bytes: Tensor
    packing: Packing

    def state(self) -> State:
        """Views of the bytes as a state of one row."""
        return self.packing.state(self.bytes)


class Packing:
    """Copies between the rows of ``tensors`` and packed rows; on a GPU each is one launch.

    Args:
        layers: names and tensors [rows, ...] of each layer, contiguous, of a state; packed in this order.
        others: more tensors with as many rows, moved and cleared with these, but not packed.
    """

    def __init__(self, layers: Sequence[dict[str, Tensor]], others: Sequence[Tensor] = ()) -> None:
        self._layers, self._tensors = layers, [t for layer in layers for t in layer.values()]
        self._others = list(others)
        self._offsets, self.size = [], 0  # of a packed row, in bytes
        for t in self._tensors:
            self._offsets.append(self.size)
            self.size += -(-t[0].nbytes // ALIGNED) * ALIGNED
        self._views: dict[int, list[Tensor]] = {}
        self._table: Any = None
        self._all: Any = None
        if on_gpu(self._tensors[0]):
            from linattn.ops.triton.rows import Table

            self._table = Table(self._tensors, self._offsets)
            self._all = Table([*self._tensors, *self._others], [*self._offsets, *[0] * len(self._others)]) if others else self._table

    def views(self, row: int) -> list[Tensor]:
        """Views of ``row`` in all tensors, the others last; cached, because a hundred views take Python long."""
        if row not in self._views:
            self._views[row] = [t[row] for t in (*self._tensors, *self._others)]
        return self._views[row]

    def pack(self, row: int, count: int) -> list[Packed]:
        """Copies of ``count`` rows from ``row`` on."""
        packed = torch.empty(count, self.size, dtype=torch.uint8, device=self._tensors[0].device)
        if self._table is not None:
            self._table.pack(packed, row)
        else:
            for own, there in zip(self._tensors, self._split(packed), strict=True):
                there.copy_(own[row : row + count])
        return [Packed(one, self) for one in packed.unbind()]

    def unpack(self, packed: Tensor, row: int) -> None:
        """Copy ``packed`` [n, bytes] into the rows from ``row`` on."""
        if self._table is not None:
            self._table.unpack(packed, row)
        else:
            for own, there in zip(self._tensors, self._split(packed), strict=True):
                own[row : row + len(packed)] = there

    def move(self, row: int, target: int) -> None:
        """Copy ``row`` to ``target``, and fill ``row`` with zeros; only the latter if they are the same."""
        if self._all is not None:
            self._all.clear(row) if row == target else self._all.move(row, target)
            return
        if row != target:
            torch._foreach_copy_(self.views(target), self.views(row))
        torch._foreach_zero_(self.views(row))

    def state(self, packed: Tensor) -> State:
        """Views of a packed row as a state of one row."""
        views = iter(self._split(packed[None]))
        return State([{name: next(views) for name in layer} for layer in self._layers])

    def _split(self, packed: Tensor) -> list[Tensor]:
        """Views of ``packed`` [n, bytes] as tensors like those of the layers, with n rows."""
        rows = len(packed)
        return [
            packed[:, start : start + t[0].nbytes].view(t.dtype).view(rows, *t.shape[1:])
            for t, start in zip(self._tensors, self._offsets, strict=True)
        ]
