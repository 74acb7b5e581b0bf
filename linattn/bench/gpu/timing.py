"""Timing: the median of calls with cold inputs, and memory beyond the arguments."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Step = Callable[[], object]
L2_TIMES = 4  # total size of rotating inputs, as a multiple of the cache


def copies(nbytes: int, device: str) -> int:
    """Number of input sets of ``nbytes`` bytes so that none is in the L2 when reused."""
    if device != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(64, -(-L2_TIMES * cache // nbytes))


def milliseconds(steps: Sequence[Step], device: str, seconds: float) -> float:
    """Median milliseconds of calls that rotate through ``steps``, over about ``seconds``."""
    clock = _events if device == "cuda" else _wall
    clock(steps, 2)  # warm-up: compiles, allocates
    times = clock(steps, 3)
    each = max(statistics.median(times), 1e-3)
    if sum(times) > 4 * seconds * 1e3:
        return each
    count = int(min(max(seconds * 1e3 / each, 5), 500))
    clock(steps, min(count, max(1, int(20 / each))))  # raises the clock rate
    return statistics.median(clock(steps, count))


def _events(steps: Sequence[Step], count: int) -> list[float]:
    """Milliseconds of each call on the device, queued without waiting."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
    torch.cuda.synchronize()
    for i in range(count):
        marks[2 * i].record()
        steps[i % len(steps)]()
        marks[2 * i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(marks[::2], marks[1::2], strict=True)]


def _wall(steps: Sequence[Step], count: int) -> list[float]:
    times = []
    for i in range(count):
        start = time.perf_counter()
        steps[i % len(steps)]()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def graph_milliseconds(steps: Sequence[Step], seconds: float) -> float:
    """Milliseconds of one of ``steps`` when all of them are one CUDA graph, without launch overhead."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for step in steps:
                step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    kept = []  # results stay alive during the capture, or later calls would reuse their memory
    with torch.cuda.graph(graph):
        for step in steps:
            kept.append(step())  # noqa: PERF401  (a comprehension would hide the capture)
    return milliseconds([graph.replay], "cuda", seconds) / len(steps)


def peak_megabytes(step: Step, device: str) -> float | None:
    """Peak memory of ``step`` beyond what was allocated before, in MB of 2^20 bytes; None if memory is not tracked."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
