"""Copies of rows of many tensors in one launch: a row of each tensor to a packed row, back, or to another row.

torch has no such operation for several dtypes, and a hundred launches take longer on the host than a decoding step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops.triton import launch

BLOCK = 4096  # words of a program


@triton.jit(do_not_specialize=["row", "target", "packed_row"])
def rows_kernel(
    chunks, packed, row, target, packed_row,
    BLOCK: tl.constexpr, WORD: tl.constexpr, PACK: tl.constexpr, UNPACK: tl.constexpr, MOVE: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Program (i, j) handles chunk i of row ``row`` + j. Columns of ``chunks`` [n, 5] int64: address, bytes of a row, offsets in the row
    and in a packed row, and words. ``packed_row``: bytes between packed rows, which may be 0.
    """
    place = chunks + tl.program_id(0) * 5
    own = row + tl.program_id(1).to(tl.int64)
    stride, offset = tl.load(place + 1), tl.load(place + 2)
    first = tl.load(place) + offset
    kind: tl.constexpr = tl.pointer_type(tl.int32 if WORD == 4 else tl.int16 if WORD == 2 else tl.int8)
    index = tl.arange(0, BLOCK)
    inside = index < tl.load(place + 4)
    here = (first + own * stride).to(kind) + index
    there = (packed + tl.program_id(1).to(tl.int64) * packed_row + tl.load(place + 3)).to(kind) + index
    if UNPACK:
        tl.store(here, tl.load(there, mask=inside), mask=inside)
    else:
        x = tl.load(here, mask=inside)
        if PACK:
            tl.store(there, x, mask=inside)
        if MOVE:
            tl.store((first + target * stride).to(kind) + index, x, mask=inside)
        if CLEAR:
            tl.store(here, tl.zeros([BLOCK], tl.int8), mask=inside)


class Table:
    """Addresses of rows of ``tensors`` [rows, ...], contiguous, on one device; number i is at ``offsets[i]`` of a packed row."""

    def __init__(self, tensors: Sequence[Tensor], offsets: Sequence[int]) -> None:
        sizes = [t[0].nbytes for t in tensors]
        self._word = math.gcd(4, *sizes, *offsets, *(t.data_ptr() for t in tensors))
        step = BLOCK * self._word
        chunks = [
            (t.data_ptr(), size, start, offset + start, min(step, size - start) // self._word)
            for t, size, offset in zip(tensors, sizes, offsets, strict=True)
            for start in range(0, size, step)
        ]
        self._chunks = torch.tensor(chunks, dtype=torch.int64).to(tensors[0].device)

    def pack(self, packed: Tensor, row: int) -> None:
        """Copy the rows from ``row`` on into ``packed`` [n, bytes]."""
        self._launch(packed, row, packed.stride(0), len(packed), PACK=True)

    def unpack(self, packed: Tensor, row: int) -> None:
        """Copy ``packed`` [n, bytes] into the rows from ``row`` on."""
        self._launch(packed, row, packed.stride(0), len(packed), UNPACK=True)

    def move(self, row: int, target: int) -> None:
        """Copy ``row`` to ``target`` and fill it with zeros."""
        self._launch(self._chunks, row, 0, 1, target, MOVE=True, CLEAR=True)

    def clear(self, row: int) -> None:
        """Fill ``row`` with zeros."""
        self._launch(self._chunks, row, 0, 1, CLEAR=True)

    def _launch(self, packed: Tensor, row: int, packed_row: int, count: int, target: int = 0, **what: bool) -> None:
        flags = {name: what.get(name, False) for name in ("PACK", "UNPACK", "MOVE", "CLEAR")}
        with launch.on_device(self._chunks.device):
            rows_kernel[(len(self._chunks), count)](
                self._chunks, packed.view(torch.uint8), row, target, packed_row, BLOCK=BLOCK, WORD=self._word, num_warps=8, **flags
            )
