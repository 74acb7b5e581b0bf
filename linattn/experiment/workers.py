"""Execution of runs in processes: one per core on a CPU, a few on a GPU, each with several trainings on streams."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from linattn import mixers
from linattn.experiment.study import LeftOut, Result, Run, Study

GPU_PROCESSES = 3  # others continue while one compiles
STREAMS = 4  # concurrent trainings of a process, enough to fill the GPU with small kernels


@dataclass(frozen=True)
class Finished:
    """Finished run with its result (``{"left_out": reason}`` if skipped) and its duration in seconds."""

    run: Run
    result: Result
    seconds: float


@dataclass(frozen=True)
class Failed:
    """Run that raised an error, by a bug or lack of memory. It is not saved, so that it is repeated."""

    run: Run
    error: str


def work(study: Study, runs: Sequence[Run], end: float) -> Iterator[Finished | Failed]:
    """Execute ``runs`` in any order; none starts after ``end`` (of time.monotonic), but started ones are finished.

    Runs are executed in other processes, unless the study is ``alone`` or has a mixer that other processes cannot import.
    """
    todo = (run for run in runs if time.monotonic() < end)  # evaluated for one run at a time
    if study.alone or _only_here():
        return (measured(study.measure, run, strict=study.strict) for run in todo)
    count, together = (GPU_PROCESSES, STREAMS) if torch.cuda.is_available() else (cores(), 1)
    return _in_processes(study.measure, todo, min(count, len(runs)), together)


def _only_here() -> bool:
    """True if a mixer was registered in an interactive session or a notebook, from which no other process can import it."""
    main = sys.modules["__main__"]
    importable = hasattr(main, "__file__") or getattr(main, "__spec__", None) is not None
    return not importable and any(mixers.info(name).cls.__module__ == "__main__" for name in mixers.available())


def cores() -> int:
    """Count the processor cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measured(measure: Callable, run: Run, *, strict: bool = False) -> Finished | Failed:
    """Execute ``measure(run)`` with its duration; raise its errors if ``strict``."""
    *_, last = steps(measure, run, strict=strict)
    assert last is not None
    return last


def steps(measure: Callable, run: Run, *, strict: bool = False) -> Generator[Finished | Failed | None, None, None]:
    """Iterate over the steps of ``measure(run)``: None after each, and its result at the end."""
    begin = time.perf_counter()
    try:
        result = measure(run)
        if isinstance(result, Generator):
            result = yield from result
    except LeftOut as reason:
        result = {"left_out": str(reason)}
    except Exception as error:  # of any mixer; other runs continue
        if strict:
            raise
        yield Failed(run, f"{type(error).__name__}: {error}")
        return
    yield Finished(run, result, time.perf_counter() - begin)


def _in_processes(measure: Callable, todo: Iterator[Run], count: int, together: int) -> Iterator[Finished | Failed]:
    """Execute runs in ``count`` processes, up to ``together`` at once in each."""
    context: Any = multiprocessing.get_context("spawn")
    tasks, results = context.Queue(), context.Queue()

    def start() -> Any:
        worker = context.Process(target=_serve, args=(measure, tasks, results, together), daemon=True)
        worker.start()
        return worker

    workers: list[Any] = []
    begun = 0
    try:
        workers += (start() for _ in range(count))
        while True:
            while begun < count * together and (run := next(todo, None)) is not None:
                tasks.put(run)
                begun += 1
            if not begun:
                return
            one = _next(results, workers, start)
            begun -= 1
            yield one
    finally:  # workers are idle, or their runs are no longer needed
        for worker in workers:
            worker.terminate()
            worker.join()


def _next(results: Any, workers: list[Any], start: Callable[[], Any]) -> Finished | Failed:
    """Wait for the next result; replace a process that exited because it lost its device."""
    while True:
        for i, worker in enumerate(workers):
            if worker.exitcode == 0:
                workers[i] = start()
        try:
            return results.get(timeout=1)
        except queue.Empty:
            ended = [worker.exitcode for worker in workers if worker.exitcode]
            if ended:
                raise RuntimeError(f"a worker process ended with exit code {ended[0]}: out of memory?") from None


def _serve(measure: Callable, tasks: Any, results: Any, together: int) -> None:
    """Execute runs from the queue until this process is ended; several runs alternate step by step, each on its own stream.

    After an unrecoverable device error (an illegal access to memory) the current runs fail and this process exits, because all
    remaining runs would fail within seconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # processes share the cores
    running: list[tuple[Generator, AbstractContextManager]] = []
    lost = False
    while running or not lost:
        while len(running) < together and not lost:
            try:
                run = tasks.get(block=not running)
            except queue.Empty:
                break
            running.append((steps(measure, run), _stream()))
        for turn in list(running):
            taking, stream = turn
            with stream:
                one = next(taking)
            if one is not None:
                running.remove(turn)
                results.put(one)
                lost = lost or (isinstance(one, Failed) and device_lost())


def device_lost() -> bool:
    """True if an error has made the GPU unusable for this process."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _end_with_parent() -> None:
    """End this process when its parent ends for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _stream() -> AbstractContextManager:
    """Context with a separate stream for the kernels of one run."""
    return torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else nullcontext()
