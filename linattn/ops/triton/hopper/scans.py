"""Columns, pipelines and registers of the scans of states and of their cotangents."""

from __future__ import annotations

from linattn.ops.triton.hopper import WIDEST
from linattn.ops.triton.hopper.common import SHARED, M
from linattn.ops.triton.plan import CHANNEL, DELTA, ERASE, HEAD, PLAIN, Family


def forward(family: Family, size_k: int, size_v: int, output: bool, keep: bool, transition: bool) -> dict[str, int]:
    """Columns of a program, its pipeline and registers."""
    erase, delta, by_channel = family.rule == ERASE, family.rule == DELTA, family.decay == CHANNEL
    meets = output and not family.prepared
    columns = min(size_k, size_v, WIDEST) if transition else min(size_v, WIDEST)
    parts = columns // M.value
    wide = 1 + output + 2 * erase + (delta and by_channel)
    square = (erase or delta) + output * (1 + erase)
    stage = 128 * (wide * size_k + columns + square * 64) + 1040  # the last summand is for weights
    left = parts * 8192 * (output or (keep and family.rule != PLAIN)) + parts * 128 * size_k * keep + 512
    programs = 2 if parts == 1 and 2 * (left + 2 * stage) <= SHARED and not (meets and size_k > 64) else 1
    stages = min(2 if output and delta else 6, (SHARED // programs - left) // stage)  # outputs of the delta rule wait only for products
    if parts == 2:
        registers, most = (184, 128) if meets else (224, 160)
    elif meets:
        registers, most = (80, 80) if programs == 2 else (104, 160)
    else:
        registers, most = 24, 128
    return dict(BV=columns, STAGES=stages, num_warps=4, REGISTERS=registers, maxnreg=most)


def backward(family: Family, size_k: int, size_v: int, local: bool, keep: bool) -> dict[str, int]:
    """Columns of a program, its pipeline and registers."""
    plain, erase = family.rule == PLAIN, family.rule == ERASE
    reads = not (plain and local)
    reads_w = erase or (not plain and family.decay == CHANNEL)
    own = erase and not local
    columns = min(size_v, WIDEST)
    parts = columns // M.value
    meets = reads and not family.prepared
    b = not plain and not (local and reads_w)
    first = 128 * (columns + reads * size_k + 64 * (reads and not meets) + 64 * b)  # bytes of a stage
    second = 128 * (size_k + reads_w * size_k + own * (size_k + 128))
    staged = 128 * (keep * parts * size_k + (not local) * columns + own * columns + parts * 64 * meets)
    if family.decay == HEAD:
        first += 256 * (1 + reads + meets + (not plain and not erase)) + 16
    elif family.decay == CHANNEL:
        first += 4 * size_k

    def depths(room: int) -> tuple[int, int]:
        """Stages of the operands needed first and of the rest, in ``room`` bytes."""
        room -= staged + 512  # barriers
        late = max(1, min(6, room // (first + second)))
        return min(6, (room - late * second) // first), late

    stages, late = depths(SHARED // 2 - 1024)  # a single warpgroup leaves registers for a second program
    if parts == 2 or min(stages, late) < 2:
        stages, late = depths(SHARED)
    registers, most = (224, 160) if parts == 2 else (24, 128)
    return dict(BV=columns, STAGES=stages, LATE=late, num_warps=4, REGISTERS=registers, maxnreg=most)
