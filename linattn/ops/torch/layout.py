"""Layout of tokens in chunks, [B, T, H, X] <-> [N, B, H, C, X], and the passage of the state from chunk to chunk.

Chunks are the first dimension so that the loop over them reads contiguous slices. Padding tokens are zero in every argument: they
neither write nor erase, and with a logarithm of zero they do not decay.

Each packed sequence is padded to whole chunks, so that a chunk belongs to one sequence. The largest number of chunks, T // C + N,
follows from the shapes, without reading ``cu_seqlens`` and without synchronisation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.inputs import Inputs

SLAB = 64 * 64 * 64  # entries of all C x C matrices of a slab on a CPU, which fits the cache with its temporaries


class Passage:
    """State [B, H, K, V] carried through the chunks."""

    def __init__(self, initial: Tensor) -> None:
        self.state = initial

    def enter(self) -> Tensor:
        """Return the state before the next chunk."""
        return self.state

    def leave(self, state: Tensor) -> None:
        """Store ``state``, the state after the chunk."""
        self.state = state

    def final(self) -> Tensor:
        """Return the last state of each sequence."""
        return self.state


class Dense:
    """Layout of sequences that are rows of the batch."""

    def __init__(self, tokens: int, size: int, slab: int) -> None:
        self.tokens, self.size, self.slab = tokens, size, slab
        self.padding = -tokens % size

    def split(self, x: Tensor, dtype: torch.dtype, padding: float = 0.0) -> list[Tensor]:
        """Split [B, T, H, X] into slabs of chunks [n, B, H, C, X] in ``dtype``."""
        if self.padding:
            x = F.pad(x, (0, 0, 0, 0, 0, self.padding), value=padding)
        slabs = x.split(self.slab * self.size, 1)
        return [s.unflatten(1, (-1, self.size)).permute(1, 0, 3, 2, 4).contiguous().to(dtype) for s in slabs]

    def join(self, slabs: list[Tensor]) -> Tensor:
        """Join slabs [n, B, H, C, V] to [B, T, H, V]."""
        o = torch.cat([_contiguous_gradient(o).permute(1, 0, 3, 2, 4) for o in slabs], 1).flatten(1, 2)
        return o[:, : self.tokens] if self.padding else o

    def passage(self, initial: Tensor) -> Passage:
        return Passage(initial)


class Packed:
    """Layout of packed sequences in one row, which start at ``cu_seqlens`` [N + 1]."""

    def __init__(self, cu_seqlens: Tensor, tokens: int, size: int, slab: int) -> None:
        self.tokens, self.size, self.slab, rows = tokens, size, slab, cu_seqlens.shape[0] - 1
        cu = cu_seqlens.long()
        self.chunks = (cu.diff() + size - 1) // size  # [N] chunks of each sequence
        self.ends = self.chunks.cumsum(0)  # [N] one past each sequence's last chunk
        first = self.ends - self.chunks
        chunk = torch.arange(tokens // size + rows, device=cu.device)
        self.row = torch.searchsorted(self.ends, chunk, right=True).clamp(max=rows - 1)  # [M] the sequence of each chunk
        self.starts = chunk == first[self.row]
        token = (cu[self.row] + (chunk - first[self.row]) * size)[:, None] + torch.arange(size, device=cu.device)  # [M, C]
        self.real = (token < cu[self.row + 1][:, None]).flatten()
        self.source = torch.where(self.real, token.flatten(), 0)
        token = torch.arange(tokens, device=cu.device)
        row = torch.searchsorted(cu[1:].contiguous(), token, right=True)
        self.place = first[row] * size + token - cu[row]  # [T]

    def split(self, x: Tensor, dtype: torch.dtype, padding: float = 0.0) -> list[Tensor]:
        padded = torch.where(self.real[:, None, None], x[0].index_select(0, self.source), padding)  # [M C, H, X]
        chunks = padded.unflatten(0, (-1, self.size)).transpose(1, 2)[:, None]
        return [s.contiguous().to(dtype) for s in chunks.split(self.slab)]

    def join(self, slabs: list[Tensor]) -> Tensor:
        o = torch.cat([_contiguous_gradient(o)[:, 0].transpose(1, 2) for o in slabs]).flatten(0, 1)
        return o.index_select(0, self.place)[None]

    def passage(self, initial: Tensor) -> Passage:
        return PackedPassage(self, initial)

    def of_chunks(self, x: Tensor) -> list[Tensor]:
        """Expand [N, ...] to slabs [n, 1, ...] with the row of each chunk's sequence."""
        return list(x.index_select(0, self.row)[:, None].split(self.slab))


class PackedPassage(Passage):
    """Passage of the state where each packed sequence starts from its own initial state."""

    def __init__(self, layout: Packed, initial: Tensor) -> None:
        super().__init__(initial[:1])
        self.layout, self.initial = layout, initial
        self.left: list[Tensor] = []
        self.starts = layout.starts[:, None, None, None, None].unbind()
        self.own = initial.index_select(0, layout.row)[:, None].unbind()  # each [1, H, K, V]

    def enter(self) -> Tensor:
        n = len(self.left)
        return torch.where(self.starts[n], self.own[n], self.state)

    def leave(self, state: Tensor) -> None:
        self.left.append(state)
        self.state = state

    def final(self) -> Tensor:
        left = torch.cat(self.left).index_select(0, (self.layout.ends - 1).clamp(min=0))
        return torch.where((self.layout.chunks > 0)[:, None, None, None], left, self.initial)


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is made contiguous once for the matrix products that read it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(o: Tensor) -> Tensor:
        return o.view_as(o)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _contiguous_gradient(o: Tensor) -> Tensor:
    return o if torch.compiler.is_compiling() or tracing.forward_mode() else _ContiguousGradient.apply(o)  # compilers choose layouts


def layout_of(inputs: Inputs, size: int) -> Dense | Packed:
    """Build the layout of the keys and values of ``inputs`` in chunks of ``size`` tokens.

    A CPU processes the sequence in slabs that fit its cache; GPUs and compilers get all chunks at once.
    """
    batch, tokens = inputs.k.shape[:2]
    whole = inputs.v.device.type != "cpu" or torch.compiler.is_compiling()
    slab = max(1, tokens if whole else SLAB // (size * size * batch * inputs.heads))
    return Dense(tokens, size, slab) if inputs.cu_seqlens is None else Packed(inputs.cu_seqlens, tokens, size, slab)


def shared(x: Tensor, heads: int) -> Tensor:
    """Repeat [., ., Hk, ...] to [., ., H, ...], a copy for each of the H heads of v."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)
