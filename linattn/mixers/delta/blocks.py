"""Blocks of time for memories that learn by mini-batches: TTT and Titans. A block begins where the position is a multiple of its size."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.mixers.context import CallContext


class Blocks:
    """Tokens of one call in ``count`` blocks of ``size``, a row for every sequence; a block may have begun in an earlier call.

    ``present`` [rows, count, size] marks tokens of this call, ``finished`` [rows, count] the blocks that end in it.
    """

    def __init__(self, call: CallContext, size: int, device: torch.device) -> None:
        self.call, self.size = call, size
        longest = call.tokens + (0 if call.fresh else size - 1)
        self.count = max(1, -(-longest // size))
        self.shift = (call.start % size)[:, None]  # [rows, 1]
        self.token = torch.arange(self.count * size, device=device) - self.shift  # [rows, count * size]
        end = call.counts[:, None]
        self.present = ((self.token >= 0) & (self.token < end)).unflatten(1, (self.count, size))
        self.finished = self.shift + end >= (torch.arange(self.count, device=device) + 1) * size

    def place(self, x: Tensor) -> Tensor:
        """Arrange [B, T, H, ...] as [rows, count, H, size, ...], with zeros for missing tokens."""
        rows, _ = self.call.to_rows(x)
        if self.call.tokens == 0:
            rows = torch.cat([rows, rows.new_zeros(rows.shape[0], 1, *rows.shape[2:])], 1)  # gather needs at least one entry
        index = self.token.clamp(0, rows.shape[1] - 1)
        placed = rows.gather(1, index.view(*index.shape, *[1] * (rows.ndim - 2)).expand(-1, -1, *rows.shape[2:]))
        placed = placed.unflatten(1, (self.count, self.size))
        real = self.present.view(*self.present.shape, *[1] * (rows.ndim - 2))
        return torch.where(real, placed, 0.0).transpose(2, 3)

    def back(self, blocks: list[Tensor]) -> Tensor:
        """Arrange the ``count`` outputs [rows, H, size, V] as [B, T, H, V]."""
        y = torch.cat(blocks, 2).transpose(1, 2)  # [rows, count * size, H, V]
        index = self.shift + torch.arange(self.call.tokens, device=y.device)
        return self.call.from_rows(y.gather(1, index[..., None, None].expand(-1, -1, *y.shape[2:])))
