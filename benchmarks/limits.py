"""Memory-bandwidth bounds of our kernels on an H200, beside measured times.

A count is of tensors [B, T, H, 128] in bfloat16: 1 a tensor of queries, keys, values or results, 2 the states of chunks of 64 tokens,
1/2 a matrix of pairs of a chunk. Decays per channel count 1, those per head and strengths nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from linattn.bench.gpu.cases import SHAPES, Shape

RATE = 4.2e12  # bytes a second reached by our fastest kernels, of 4.8e12
SHAPE = SHAPES[0]  # the ends of its segments are not counted


class Moved(NamedTuple):
    """Tensors that the kernels of a pass read and write, one number a kernel, and the minimum: inputs and results."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    least: tuple[int, int]


MOVED = {
    "none": Moved((4,), (4, 4, 4), (4, 7)),  # outputs; three exchanged scans
    "head": Moved((4,), (4, 9), (4, 7)),  # states; cotangents and gradients in one
    "channel": Moved((5.5, 4.5), (4, 11.5), (5, 9)),  # prepare, outputs; states, cotangents and gradients in one
    "delta": Moved((3, 5), (3, 5.5, 10), (4, 7)),  # prepare, outputs; prepare, states, cotangents and gradients in one
    "gated_delta": Moved((3, 5), (3, 5.5, 10), (4, 7)),
    "kda": Moved((7, 6), (7, 6.5, 8, 13), (5, 9)),  # prepare, outputs; prepare, states, cotangents, gradients
    "erase": Moved((11, 7.5), (11, 7.5, 11, 18), (7, 13)),
}


def milliseconds(count: float, shape: Shape = SHAPE) -> float:
    return count * 2 * shape.B * shape.T * shape.H * shape.D / RATE * 1e3


def rows(family: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Milliseconds that bytes take: of our kernels and of inputs and results alone, forward and forward+backward."""
    moved = MOVED[family]
    forward, both = sum(moved.forward), sum(moved.forward) + sum(moved.backward)
    return (milliseconds(forward), milliseconds(moved.least[0])), (milliseconds(both), milliseconds(sum(moved.least)))
