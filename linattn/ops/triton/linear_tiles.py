"""Tiles of the product of several vectors and a few matrices.

The cost of such a product is that of reading the matrices, so all multiprocessors have to read. Wide tiles read the vectors less often,
but there are few of them; several programs then share the channels of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton

WIDTHS = (128, 64, 32)  # rows of a matrix per tile: the widest that gives MANY tiles
MANY = 200  # tiles, more than one per multiprocessor of the largest devices
PROGRAMS = 80  # programs that are enough: sharing channels costs more than a few idle multiprocessors
SHARED = 96 << 10  # bytes of shared memory of a program: two programs fit on a Hopper multiprocessor, one on an Ampere's


@dataclass(frozen=True)
class Tiles:
    """``BM`` vectors x ``BN`` rows of a matrix, ``BK`` channels at a time, which ``SPLIT`` programs share."""

    BM: int
    BN: int
    BK: int
    SPLIT: int
    num_warps: int
    num_stages: int

    def grid(self, vectors: int, sizes: Sequence[int]) -> tuple[int, int, int]:
        """Number of programs; tiles with the same rows of a matrix are adjacent, so that rows are read from memory once."""
        return triton.cdiv(vectors, self.BM), sum(triton.cdiv(n, self.BN) for n in sizes), self.SPLIT


def choose(vectors: int, K: int, sizes: Sequence[int], itemsize: int, *, gated: bool, counters: int) -> Tiles:
    """Choose the tiles for ``vectors`` of K channels and matrices of ``sizes`` rows; at most ``counters`` tiles have several programs."""
    wide = itemsize < 4  # on tensor cores
    BM = min(max(triton.next_power_of_2(vectors), 16), 64 if wide else 32)
    BN = 64
    if BM == 64:
        BN = next((n for n in WIDTHS if _tiles(vectors, sizes, BM, n) >= MANY), WIDTHS[-1])
    BK = (128 if BN < 128 else 64) if wide else 32
    tiles, steps = _tiles(vectors, sizes, BM, BN), triton.cdiv(K, BK)
    split = 1
    while tiles <= counters and tiles * split < PROGRAMS and steps >= 8 * split:
        split *= 2
    split = triton.cdiv(steps, triton.cdiv(steps, split))  # programs that have any channels
    stage = (BM + BN * (2 if gated else 1)) * BK * itemsize
    return Tiles(BM, BN, BK, split, num_warps=4, num_stages=min(max(SHARED // stage, 2), 5))


def _tiles(vectors: int, sizes: Sequence[int], BM: int, BN: int) -> int:
    return triton.cdiv(vectors, BM) * sum(triton.cdiv(n, BN) for n in sizes)
