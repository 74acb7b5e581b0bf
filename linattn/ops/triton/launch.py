"""Launching kernels: the first call of its kind is recorded, later ones are replayed, which spares the host most of its work."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from linattn.ops import gpu
from linattn.ops.triton import fitting
from linattn.ops.triton.fitting import Grid, Tiles

INTERPRETED = gpu.INTERPRETED
MOST = 1024  # recorded calls; the oldest makes room
ALIGNED = 256  # bytes
FUSED = {"enable_fp_fusion": True}  # as all were measured: Triton 3.9 warns that the default, which this is so far, will change
Tensors = tuple[Any, ...]  # each a tensor or None
_programs: dict[tuple, Program] = {}
_compiled: set[tuple] = set()
_replay_refusals: dict[torch.device, str | None] = {}


def run(
    body: Callable[..., Tensors], like: Tensor, tensors: Tensors, *options: object, then: Callable[..., object] | None = None
) -> Tensors:
    """``body(recorder, *tensors, *options)``: tensors that the recorder has made on the device of ``like``, or None.

    What ``body`` does follows from the shapes, strides and dtypes of ``tensors``, from which of them are absent and from
    ``options``; it touches no tensor but by a launch. ``then(recorder, results, *tensors, *options)`` is what is likely to be
    run next: its kernels are compiled at the same time.
    """
    tensors = tuple(t if t is None else _signed(t) for t in tensors)
    with on_device(like.device):
        if INTERPRETED:
            return body(Recorder(like, tensors), *tensors, *options)
        make_room()
        if replay_refusal(like.device) is not None:
            return body(Recorder(like, tensors), *tensors, *options)
        if _watched(knobs.runtime.launch_enter_hook) or _watched(knobs.runtime.launch_exit_hook):
            return body(Recorder(like, tensors), *tensors, *options)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        # Triton compiles for whether an address is a multiple of 16.
        kinds = [t if t is None else (t.shape, t.stride(), t.dtype, a & 15) for t, a in zip(tensors, addresses, strict=True)]
        key = (body, driver.active.get_current_device(), options, *kinds)
        program = _programs.get(key)
        if program is not None:
            return program(like, addresses)
        sizes = [t if t is None else (t.shape[2:], t.dtype, a & 15) for t, a in zip(tensors, addresses, strict=True)]
        if (sort := (body, options, then is None, *sizes)) not in _compiled:
            _compile(body, then, like, tensors, options)
            _compiled.add(sort)
        tensors = tuple(t if t is None else t.detach() for t in tensors)  # what is one tensor now may be two the next time
        recorder = Recorder(like, tensors)
        made = body(recorder, *tensors, *options)
        if len(_programs) >= MOST:
            _programs.pop(next(iter(_programs)))
        _programs[key] = Program(recorder, made)
        return made


def replay_refusal(device: torch.device) -> str | None:
    """Why launches on ``device`` are not replayed, or None if they are; tried once per process and device, see probe.py."""
    if device not in _replay_refusals:
        from linattn.ops.triton import probe

        if capturing():
            return "a CUDA graph is being captured, and whether launches can be replayed has not been tried before"
        _replay_refusals[device] = probe.refusal(device)
    return _replay_refusals[device]


def capturing() -> bool:
    """Whether a CUDA graph is being captured, into which nothing may go that is only tried."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def off(device: torch.device) -> list[str]:
    """What every call on ``device`` would be faster by and has not, for ``explain``."""
    if INTERPRETED or device.type != "cuda":
        return []
    with on_device(device):
        reason = replay_refusal(device)
    return [] if reason is None else [f"replayed launches: off, because {reason}"]


def current_stream() -> int:
    gpu = driver.active
    return gpu.get_current_stream(gpu.get_current_device())


def make_room() -> None:
    """Let kernels that make descriptors, those for Hopper, have memory for them. Who has set an allocator in this thread keeps it."""
    try:
        from triton.runtime._allocation import NullAllocator, _allocator
    except ImportError:  # then those kernels fail in their trial, and the others need none
        return
    if isinstance(_allocator.get(), NullAllocator):
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))


class Recorder:
    """Makes tensors and launches kernels, and remembers what it did."""

    def __init__(self, like: Tensor, given: Tensors):
        self.like, self.given = like, given
        self.made: list[tuple[Tensor, Callable[..., Tensor]]] = []
        self.launches: list[tuple] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self._make(Tensor.new_empty, shape, dtype)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Only for what the body gives back."""
        return self._make(Tensor.new_zeros, shape, dtype)

    def _make(self, how: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        t = how(self.like, shape, dtype=dtype)
        self.made.append((t, how))
        return t

    def launch(
        self, kernel, grid: Grid, tensors: Tensors, numbers: tuple[int | float, ...], *, tiles: Tiles | None = None, **constants: Any
    ) -> None:
        """``kernel`` takes tensors first, then numbers, then constants; ``tiles`` says which of these a card may have smaller."""
        compiled, grid = fitting.launch(kernel, grid, (*tensors, *numbers), FUSED | constants, tiles)
        self.launches.append((kernel, compiled, grid, tensors, numbers))


class Compiler(Recorder):
    """Compiles what would be launched, and makes tensors without memory."""

    def __init__(self, like: Tensor, given: Tensors):
        super().__init__(like, given)
        self.awaited: set[Future] = set()

    def _make(self, how: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return how(self.like, shape, dtype=dtype, device="meta")

    def launch(
        self,
        kernel,
        grid: Grid,
        tensors: Tensors,
        numbers: tuple[int | float, ...],
        *,
        tiles: Tiles | None = None,
        **constants,
    ) -> None:
        compiled = kernel.warmup(*tensors, *numbers, grid=grid, **fitting.chosen(kernel, (*tensors, *numbers), FUSED | constants))
        future = getattr(compiled, "future", None)  # else it was there
        if future is not None and future not in self.awaited:
            self.awaited.add(future)
            future.add_done_callback(_build_launcher)


def _build_launcher(compiled: Future) -> None:
    """The C that passes a kernel its arguments, into the cache: Triton has it compiled at the first launch, one after the other."""
    with suppress(Exception):  # it fails again, and is reported, when the kernel is launched
        kernel = compiled.result()
        driver.active.launcher_cls(kernel.src, kernel.metadata)


def _compile(body: Callable[..., Tensors], then: Callable[..., object] | None, like: Tensor, tensors: Tensors, options: tuple) -> None:
    """All kernels of ``body`` and ``then`` at once. What fails to compile fails again, and is reported, when it is launched."""
    from triton.runtime._async_compile import AsyncCompileMode

    compiler = Compiler(like, tensors)
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        results = body(compiler, *tensors, *options)
        if then is not None:
            then(compiler, results, *tensors, *options)


class Program:
    """Launches that wait for addresses. What is not given back lies end to end in one piece of memory."""

    def __init__(self, recorder: Recorder, results: Tensors):
        back = {id(t) for t in results}
        wanted = [(t, how) for t, how in recorder.made if id(t) in back]
        spare = [t for t, _ in recorder.made if id(t) not in back]
        self.results = [(how, t.shape, t.dtype) for t, how in wanted]
        self.offsets: list[int] = []
        self.bytes = 0
        for t in spare:
            self.offsets.append(self.bytes)
            self.bytes += -(-t.nbytes // ALIGNED) * ALIGNED
        made = [id(t) for t, _ in wanted]
        self.order = [None if t is None else made.index(id(t)) for t in results]
        places = {id(t): i for i, t in enumerate((*recorder.given, *(t for t, _ in wanted), *spare))}
        places[id(None)] = len(recorder.given) + len(recorder.made)
        self.launches = []
        for kernel, compiled, grid, tensors, numbers in recorder.launches:
            rest = (None,) * (len(kernel.params) - len(tensors) - len(numbers))  # constants: the launcher skips their places
            take = itemgetter(*(places[id(t)] for t in tensors))
            self.launches.append((compiled, grid, take, (*numbers, *rest)))

    def __call__(self, like: Tensor, addresses: list[int]) -> Tensors:
        results = [make(like, shape, dtype=dtype) for make, shape, dtype in self.results]
        addresses += [t.data_ptr() for t in results]
        if self.offsets:
            spare = like.new_empty(self.bytes, dtype=torch.uint8)
            start = spare.data_ptr()
            addresses += [start + offset for offset in self.offsets]
        addresses.append(0)
        stream = current_stream()
        for kernel, grid, take, numbers in self.launches:
            kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *take(addresses), *numbers)
        return tuple([None if i is None else results[i] for i in self.order])


def _signed(t: Tensor) -> Tensor:
    """``t`` with its own signs in memory: the imaginary part of a conjugate is a view that turns those of another tensor."""
    return t.resolve_neg() if t.is_neg() else t


def _watched(hook) -> bool:
    """Whether a profiler wants to hear of launches; Triton's own way tells it."""
    return bool(getattr(hook, "calls", hook))


def on_device(device: torch.device) -> AbstractContextManager:
    """Kernels go to the current device, so it must be that of the tensors."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
