"""Partition of a call into chunks, segments and blocks, from shapes only, for deterministic results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from linattn.ops.triton import table

WIDE = 128  # values of a state per program
NONE, HEAD, CHANNEL = range(3)
PLAIN, DELTA, ERASE = range(3)
ALL, QUERY, READ, KEY, WRITE = range(-1, 4)  # roles of tokens in the gradients


class Family(NamedTuple):
    """Family of calls that share kernels; every field is a compile-time constant."""

    decay: int
    rule: int
    before: bool  # queries read the state before the token's decay and write, and the bonus reads the token itself
    half: bool  # products of bfloat16 operands; else operands are float32, see precision

    @property
    def prepared(self) -> bool:
        return self.decay == CHANNEL or self.rule != PLAIN or self.before

    @property
    def name(self) -> str:
        return f"{('plain', 'delta', 'erase')[self.rule]}-{('none', 'head', 'channel')[self.decay]}"


@dataclass(frozen=True)
class Plan:
    """Sizes of one call. A slot is a piece of a sequence: a chunk, or a segment of whole chunks."""

    chunk: int
    length: int  # tokens in a segment
    chunks: int  # slots
    segments: int  # slots
    split: bool  # True if a sequence can have more than one segment


def plan(family: Family, batch: int, tokens: int, heads: int, sizes: tuple[int, int], sequences: int, packed: bool) -> Plan:
    """Partition of a call: ``tokens`` per row; ``sizes`` of keys and values; ``sequences``, the number of states."""
    chunk = table.chunk(family.half)
    pieces = segments(family, tokens, heads * (1 if packed else batch), sizes)
    length = -(-tokens // pieces)
    length = -(-length // chunk) * chunk
    if packed:
        length = min(length, (tokens // chunk + 1) * chunk)
        return Plan(chunk, length, tokens // chunk + sequences, tokens // length + sequences, length <= tokens)
    pieces = -(-tokens // length)
    return Plan(chunk, length, batch * -(-tokens // chunk), batch * pieces, pieces > 1)


def segments(family: Family, tokens: int, states: int, sizes: tuple[int, int]) -> int:
    """Number of segments per sequence for ``states`` of ``sizes`` over ``tokens``, measured on an H200 (see benchmarks/log.md).

    A scan reaches memory bandwidth once half of the multiprocessors are busy, a scan of little arithmetic once all are.
    """
    programs = states * -(-sizes[1] // WIDE)
    full = table.PROGRAMS * (2 if max(sizes) <= WIDE // 2 else 1)  # narrow states share a multiprocessor
    light = family.rule == PLAIN and family.decay != CHANNEL
    most = full // programs
    if not light and (max(sizes) <= WIDE // 2 or tokens < most * table.LONG):
        most = full // 2 // programs
    found = min(most, tokens // table.SHORTEST)
    return found if found >= table.FEWEST else 1


@cache
def power_of_two(n: int, least: int = 16) -> int:
    return max(least, 1 << (n - 1).bit_length())


def precision(dtype: torch.dtype, rule: int) -> str:
    """Precision of products of float32 operands. Rules that erase sum alternating signs: truncated tf32 is too coarse."""
    return "tf32" if dtype == torch.bfloat16 or (dtype == torch.float16 and rule == PLAIN) else "tf32x3"
