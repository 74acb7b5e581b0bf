"""Block sizes by family and size of keys: data, found by measuring (benchmarks/log.md says how)."""

from __future__ import annotations

from typing import NamedTuple

PROGRAMS = 256  # about two for each multiprocessor of the largest devices
SHORTEST = (512, 1024, 1024)  # tokens of a segment by rule: plain, delta, erase

NARROWEST = 64

PLAIN, DELTA, ERASE = range(3)
NONE, HEAD, CHANNEL = range(3)


class Config(NamedTuple):
    """Channels of a block on the side of keys and of values, warps, and depth of the pipeline of loads.

    Triton 3.6 miscompiles narrow blocks of bfloat16 on Hopper: keys in blocks of 32 channels with four warps are read past the
    end of shared memory, and so is the state of more than 128 keys in blocks of 16 or 32 values. So blocks of bfloat16 have at
    least ``NARROWEST`` channels on both sides, however few there are.
    """

    bk: int
    bv: int
    warps: int
    stages: int


def chunk(half: bool) -> int:
    return 64 if half else 32


def prepare(family) -> Config:
    return Config(64, 0, 4, 1)


def forward(family, size_k: int, outputs: bool) -> Config:
    if not family.half:
        return Config(0, 32 if size_k <= 128 else 16, 4, 1)
    if size_k > 128:
        return Config(0, 64, 4 if family.rule == PLAIN else 8, 1)
    return Config(0, 64, 4, 3 if family.rule == PLAIN and not outputs else 2)


def backward(family, size_k: int, outputs: bool) -> Config:
    if family.rule == ERASE and family.half and size_k > 64:
        return Config(0, 64, 8, 1)
    return forward(family, size_k, outputs)


def gradients(family) -> Config:
    if not family.half:
        return Config(64, 64, 4, 1)
    if family.decay == NONE and family.rule == PLAIN:
        return Config(64, 64, 4, 1)
    return Config(128, 128, 8, 1) if family.decay == HEAD and family.rule == PLAIN else Config(64, 64, 8, 1)
