"""How tokens lie in chunks: [B, T, H, X] <-> [N, B, H, C, X], N chunks of C tokens.

The chunks come first so that the one loop over them walks contiguous slices. Padding tokens are zero in every argument:
they write nothing, erase nothing and, zero being the logarithm of one, fade nothing.

Packed sequences are padded to whole chunks each, so a chunk belongs to one sequence and nothing can cross. How many
chunks there are at most follows from the shapes alone, T // C + N of them: no look at ``cu_seqlens``, no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops.inputs import Inputs


@dataclass(frozen=True)
class Dense:
    """Rows of the batch are the sequences."""

    tokens: int
    size: int

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, X] -> [N, B, H, C, X] in ``dtype``."""
        x = F.pad(x, (0, 0, 0, 0, 0, -self.tokens % self.size)).unflatten(1, (-1, self.size))  # [B, N, C, H, X]
        return x.permute(1, 0, 3, 2, 4).to(dtype, memory_format=torch.contiguous_format)

    def join(self, o: Tensor) -> Tensor:
        """[N, B, H, C, V] -> [B, T, H, V]."""
        return o.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : self.tokens]

    def entrance(self, initial: Tensor) -> Callable[[Tensor, int], Tensor]:
        """A function of the state that the chunk before ``n`` left, and of n: the state [B H, K, V] that chunk n starts from."""
        return lambda state, n: state

    def leave(self, states: list[Tensor], initial: Tensor) -> Tensor:
        """The final state of each sequence, from those that the chunks left."""
        return states[-1]

    def of_chunk(self, totals: Tensor) -> Tensor:
        """[rows, ...] -> [N or 1, B, ...]: each chunk's own row."""
        return totals[None]


class Packed:
    """One row, ``cu_seqlens`` [N + 1] says where each sequence starts."""

    def __init__(self, cu_seqlens: Tensor, tokens: int, size: int) -> None:
        self.tokens, self.size, rows = tokens, size, cu_seqlens.shape[0] - 1
        cu = cu_seqlens.long()
        self.chunks = (cu.diff() + size - 1) // size  # [N] chunks of each sequence
        self.ends = self.chunks.cumsum(0)  # [N] one past each sequence's last chunk
        first = self.ends - self.chunks
        chunk = torch.arange(tokens // size + rows, device=cu.device)
        self.row = torch.searchsorted(self.ends, chunk, right=True).clamp(max=rows - 1)  # [M] the sequence of each chunk
        self.starts = (chunk == first[self.row])[:, None, None, None].unbind()  # each [1, 1, 1]
        token = (cu[self.row] + (chunk - first[self.row]) * size)[:, None] + torch.arange(size, device=cu.device)  # [M, C]
        self.real = (token < cu[self.row + 1][:, None]).flatten()
        self.source = torch.where(self.real, token.flatten(), 0)
        token = torch.arange(tokens, device=cu.device)
        row = torch.searchsorted(cu[1:].contiguous(), token, right=True)
        self.place = first[row] * size + token - cu[row]  # [T]

    def split(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        padded = torch.where(self.real[:, None, None], x[0].index_select(0, self.source), 0)  # [M C, H, X]
        return padded.unflatten(0, (-1, self.size)).transpose(1, 2)[:, None].to(dtype, memory_format=torch.contiguous_format)

    def join(self, o: Tensor) -> Tensor:
        return o[:, 0].transpose(1, 2).flatten(0, 1).index_select(0, self.place)[None]

    def entrance(self, initial: Tensor) -> Callable[[Tensor, int], Tensor]:
        own = initial.index_select(0, self.row).unbind()
        return lambda state, n: torch.where(self.starts[n], own[n], state)

    def leave(self, states: list[Tensor], initial: Tensor) -> Tensor:
        left = torch.cat(states).index_select(0, (self.ends - 1).clamp(min=0))
        return torch.where((self.chunks > 0)[:, None, None, None], left, initial)

    def of_chunk(self, totals: Tensor) -> Tensor:
        return totals.index_select(0, self.row)[:, None]


def layout_of(inputs: Inputs, size: int) -> Dense | Packed:
    """The layout of the keys and values of ``inputs`` in chunks of ``size`` tokens."""
    tokens = inputs.k.shape[1]
    return Dense(tokens, size) if inputs.cu_seqlens is None else Packed(inputs.cu_seqlens, tokens, size)


def shared(x: Tensor, heads: int) -> Tensor:
    """[B, T, Hk, K] -> [B, T, H, K]: each of the H heads of v reads its own copy."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)
