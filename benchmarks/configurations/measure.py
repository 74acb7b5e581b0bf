"""Work of another process for the search: a call is checked, or the kernels that one row configures are timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.configurations.calls import INTERPRETED, Call, Place, Scan, Step
from linattn.ops.triton import table

_find = table.find
_lookups = {name: getattr(table, name).__wrapped__ for name in table.KEPT}
asked: list[Place] = []  # by this process, the last one last


@contextmanager
def configured(rows: table.Rows) -> Iterator[None]:
    """Use Triton's kernels with the configurations of ``rows`` within the context; :data:`asked` starts empty."""
    from linattn.ops.triton import hopper, launch

    if INTERPRETED:
        from tests.ops.triton import interpreter  # noqa: F401

    def find(kind: str, call: dict) -> int:
        number = _find(kind, call)
        asked.append((kind, number))
        return number

    hopper._hopper = lambda device: False
    table.find = find
    table.install(rows)
    for name, lookup in _lookups.items():  # as they are without what they keep
        setattr(table, name, lookup)
    launch._programs.clear()
    launch._compiled.clear()
    asked.clear()
    try:
        yield
    finally:
        table.find = _find


def checked(call: Call, rows: table.Rows, place: Place | None, warm: bool) -> dict[str, float]:
    """Ratios of ``call``, which must look up the row ``place``; if ``warm``, the timed pass is compiled too."""
    torch.set_num_threads(1)
    with configured(rows):
        wanted = call.asks if place is None else {place}
        ratios = call.ratios()
        if not wanted <= set(asked):
            raise AssertionError(f"{call} asks for {sorted(set(asked))}, and was to ask for {sorted(wanted)}")
        if warm and not isinstance(call, Step):
            call.step()()
        if not INTERPRETED:
            torch.cuda.synchronize()  # a fault belongs to the call that made it
            torch.cuda.empty_cache()  # many processes share the device
    return ratios


def milliseconds(call: Call, rows: table.Rows, place: Place, seconds: float) -> float:
    """Median time of the kernels in one pass of ``call`` that the row ``place`` configures."""
    from linattn.bench.gpu import timing
    from linattn.ops.triton import launch

    with configured(rows):
        if isinstance(call, Step):
            return call.milliseconds(seconds)
        if isinstance(call, Scan) and call.tokens <= 8:  # launches would be all that is measured
            return timing.graph_milliseconds([call.step()], seconds)
        kind = {"elementwise": ("forward", "backward")}.get(place[0], place[:1])
        marks: list[tuple[Any, Any]] = []
        plain = launch.Recorder

        class Timed(plain):
            """Marker of launches of kernels whose configuration was looked up last."""

            def launch(self, kernel, *arguments, **constants) -> None:
                if kernel.fn.__name__ not in kind or asked[-1] != place:
                    return super().launch(kernel, *arguments, **constants)
                before = _mark()
                super().launch(kernel, *arguments, **constants)
                marks.append((before, _mark()))
                return None

        refusal, launch.Recorder = launch.replay_refusal, Timed
        launch.replay_refusal = lambda device: "launches are timed one by one"
        try:
            return _median(call.step(), marks, seconds)
        finally:
            launch.replay_refusal, launch.Recorder = refusal, plain


def _median(step: Callable[[], object], marks: list, seconds: float) -> float:
    """Median of passes over ``seconds``, or of three if those are long."""
    for _ in range(2):  # the first one loads the kernels
        start = time.perf_counter()
        step()
        if not INTERPRETED:
            torch.cuda.synchronize()
    assert marks, "the pass has launched no kernel of the row"
    count = 1 if INTERPRETED else int(min(max(seconds / (time.perf_counter() - start), 3), 50))
    passes = []
    for _ in range(count):  # queued without waiting, so that no launch is waited for
        marks.clear()
        step()
        passes.append(list(marks))
    if INTERPRETED:
        return statistics.median(1e3 * sum(b - a for a, b in pairs) for pairs in passes)
    torch.cuda.synchronize()
    return statistics.median(math.fsum(a.elapsed_time(b) for a, b in pairs) for pairs in passes)


def _mark():
    if INTERPRETED:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
