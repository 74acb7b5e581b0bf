"""Tiles of the product of several vectors and a few matrices.

The cost of such a product is that of reading the matrices, so all multiprocessors must read. Wide tiles read the vectors less often,
but there are few of them; then several programs share the channels of a tile (split-K).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton

WIDTHS = (128, 64, 32)  # rows of a matrix per tile: the widest that gives MANY tiles
NARROW = 16  # the same where fewer than MANY_OF_ONE tiles read one tile of vectors
MANY = 170  # tiles, more than one per multiprocessor of the largest devices
MANY_OF_ONE = 100
PROGRAMS = 80  # sufficient programs: split-K costs more than a few idle multiprocessors
LONG, PROGRAMS_OF_LONG = 16, 160  # the same where each program still has half of LONG blocks of channels
SHARED = 96 << 10  # bytes of shared memory of a program: two programs fit on a Hopper multiprocessor, one on an Ampere's
DEEP, ALONE = 256, 132  # channels at a time where there are so few tiles that a multiprocessor has one
LEAST_SHARED = 99 << 10  # bytes that a program may have on the smallest cards


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


def choose(
    vectors: int, K: int, sizes: Sequence[int], itemsize: int, *, gated: bool, counters: int, shared: int = LEAST_SHARED
) -> Tiles:  # fmt: skip
    """Choose the tiles for ``vectors`` of K channels and matrices of ``sizes`` rows.

    At most ``counters`` tiles have several programs; a program has at most ``shared`` bytes of shared memory.
    """
    wide, matrices = itemsize < 4, 2 if gated else 1  # on tensor cores
    BM, BN = min(max(triton.next_power_of_2(vectors), 16), 64 if wide else 32), 64
    one, large = vectors <= BM, BM == 64
    if large:
        many, widths = (MANY_OF_ONE if one else MANY), [n for n in WIDTHS if n * matrices <= WIDTHS[0]]
        BN = next((n for n in widths if _tiles(vectors, sizes, BM, n) >= many), NARROW if one else widths[-1])
    tiles = _tiles(vectors, sizes, BM, BN)
    BK = (64 if BN * (matrices if large else 1) >= 128 else 128) if wide else 32
    row = (BM + BN * matrices) * itemsize
    deep = large and one and BN <= 32 and tiles <= ALONE and K >= DEEP and 3 * row * DEEP <= shared
    BK, stages = (DEEP, 3) if deep else (BK, min(max(SHARED // (row * BK), 2), 5))
    steps = triton.cdiv(K, BK)
    split = 1
    while tiles <= counters and steps >= 8 * split and _few(tiles * split, steps >= LONG * split):
        split *= 2
    split = triton.cdiv(steps, triton.cdiv(steps, split))  # programs with any channels
    return Tiles(BM, BN, BK, split, num_warps=4, num_stages=stages)


def _few(programs: int, long: bool) -> bool:
    return programs < (PROGRAMS_OF_LONG if long else PROGRAMS)


def _tiles(vectors: int, sizes: Sequence[int], BM: int, BN: int) -> int:
    return triton.cdiv(vectors, BM) * sum(triton.cdiv(n, BN) for n in sizes)
