"""Measurement of one figure in a library's own process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.bench.gpu import libraries, timing
from linattn.bench.gpu.cases import GRAPHED, Case, tensors

TUNING_MS = (5, 20)  # limits of an autotuner for one configuration: warm-up and measurement


@dataclass(frozen=True)
class Figure:
    """Figure of a case: ``ms`` is a median, ``peak_mb`` the memory of forward and backward besides the inputs, gradients included.

    ``difference`` is the relative distance of a peer's output to ours on the same inputs. Of a first call ``ms`` is that with an
    empty compiler cache and ``warm_ms`` that of the next process.
    """

    ms: float | None
    peak_mb: float | None = None
    difference: float | None = None
    warm_ms: float | None = None


def measure(library: str, case: Case, device: str, seconds: float, check: bool) -> dict[str, Any]:
    """Time ``case``, a pass over whole sequences or a step, with ``library``; a :class:`Figure` as a dict."""
    if device == "cuda":
        quick_tuning()
    try:
        return asdict(_figure(library, case, device, seconds, check and libraries.same(library, case)))
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _loaded(library: str, case: Case) -> libraries.Run:
    run = libraries.LIBRARIES[library](case)
    if run is None:
        raise ValueError(f"{library} has nothing for {case}")
    return run


def _figure(library: str, case: Case, device: str, seconds: float, check: bool) -> Figure:
    run = _loaded(library, case)
    first = libraries.laid_out(library, case, tensors(case, device, 0))
    count = timing.copies(sum(t.nbytes for t in first.values()), device)
    sets = [first, *(libraries.laid_out(library, case, tensors(case, device, seed)) for seed in range(1, count))]
    steps = [_step(run, x, case.mode) for x in sets]
    if case.mode in ("decode", *GRAPHED) and device == "cuda":
        return Figure(timing.graph_milliseconds(steps, seconds))
    difference = _difference(run, first) if check and case.mode == "forward" else None
    ms = timing.milliseconds(steps, device, seconds)
    peak = timing.peak_megabytes(steps[0], device) if "backward" in case.mode else None
    return Figure(ms, peak, difference)


def _step(run: libraries.Run, x: dict[str, Tensor], mode: str) -> Callable[[], object]:
    """Step to time. The incoming gradient is made beforehand; a constant decay gets none."""
    if "backward" not in mode:

        def once() -> object:
            with torch.no_grad():
                return run(x)

        return once

    wanted = [t.requires_grad_() for name, t in x.items() if name != "constant"]
    gradient = torch.randn_like(next(x[name] for name in ("v", "b", "x") if name in x))
    return lambda: torch.autograd.grad(run(x), wanted, gradient)


@torch.no_grad()
def _difference(run: libraries.Run, x: dict[str, Tensor]) -> float | None:
    try:
        expected = libraries.ours(x).float()
    except torch.OutOfMemoryError:
        return None
    return ((run(x).float() - expected).norm() / expected.norm()).item()


def first_call(library: str, case: Case, device: str) -> float:
    """Milliseconds of the first forward and backward in this process, including the loading of kernels and tuners."""
    x = tensors(case, device, 0)
    if device == "cuda":
        torch.cuda.synchronize()  # excludes the creation of the device's context
    start = time.perf_counter()
    _step(_loaded(library, case), x, "forward+backward")()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def compile_only(library: str, case: Case, device: str) -> float:
    """Fill the compiler's disk cache with every configuration that ``case`` may try, without choosing one; seconds it took."""
    start = time.perf_counter()
    _tuner(_no_bench)
    _step(_loaded(library, case), tensors(case, device, 0), case.mode)()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def quick_tuning() -> None:
    """Let Triton's autotuners in this process spend less time on each configuration than by default."""
    _tuner(_short_bench)


def _tuner(bench: Callable) -> None:
    """Let Triton's autotuners measure with ``bench``."""
    from triton.runtime import driver

    driver.active.get_benchmarker = lambda: bench


def _short_bench(call: Callable, quantiles: tuple[float, ...]) -> Any:
    from triton.testing import do_bench

    return do_bench(call, warmup=TUNING_MS[0], rep=TUNING_MS[1], quantiles=quantiles)


def _no_bench(call: Callable, quantiles: tuple[float, ...]) -> list[float]:
    call()
    return [1.0] * len(quantiles)
