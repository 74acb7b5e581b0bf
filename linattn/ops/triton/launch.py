"""Launches of kernels: the first call of its kind is recorded and later ones are replayed, which saves most of the host's work."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

from linattn.ops import gpu
from linattn.ops.triton import probe
from linattn.ops.triton.record import FUSED, UNFUSED, Compiler, Program, Recorder, Tensors, on_device

__all__ = [
    "FUSED",
    "UNFUSED",
    "Compiler",
    "Program",
    "Recorder",
    "Tensors",
    "on_device",
    "run",
]  # re-exported for bodies and callers of kernels
INTERPRETED = gpu.INTERPRETED
MOST = 1024  # largest number of recorded calls; the oldest is dropped
_programs: dict[tuple, Program] = {}
_compiled: set[tuple] = set()
_replay_refusals: dict[torch.device, str | None] = {}


def run(
    body: Callable[..., Tensors],
    like: Tensor,
    tensors: Tensors,
    *options: object,
    then: Callable[..., object] | None = None,
    pauses: Sequence[Callable[[], object]] = (),
) -> Tensors:
    """Run ``body(recorder, *tensors, *options)``, which returns tensors made by the recorder on the device of ``like``, or None.

    ``body`` must depend only on the shapes, strides and dtypes of ``tensors``, on which of them are None and on ``options``, and use
    tensors only in launches. ``then(recorder, results, *tensors, *options)`` is the body that probably runs next: its kernels are
    compiled concurrently. ``pauses`` are called in turn at ``recorder.pause()`` in the body.
    """
    tensors = tuple(t if t is None else _signed(t) for t in tensors)
    with on_device(like.device):
        if INTERPRETED:
            return body(Recorder(like, tensors, pauses), *tensors, *options)
        set_allocator()
        if replay_refusal(like.device) is not None:
            return body(Recorder(like, tensors, pauses), *tensors, *options)
        if _watched(knobs.runtime.launch_enter_hook) or _watched(knobs.runtime.launch_exit_hook):
            return body(Recorder(like, tensors, pauses), *tensors, *options)
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        # Triton specialises on addresses that are multiples of 16.
        kinds = [t if t is None else (t.shape, t.stride(), t.dtype, a & 15) for t, a in zip(tensors, addresses, strict=True)]
        key = (body, driver.active.get_current_device(), options, *kinds)
        program = _programs.get(key)
        if program is not None:
            return program(like, addresses, pauses)
        sizes = [t if t is None else (t.shape[2:], t.dtype, a & 15) for t, a in zip(tensors, addresses, strict=True)]
        if (sort := (body, options, then is None, *sizes)) not in _compiled:
            _compile(body, then, like, tensors, options)
            _compiled.add(sort)
        tensors = tuple(t if t is None else t.detach() for t in tensors)  # equal arguments may be different tensors in the next call
        recorder = Recorder(like, tensors, pauses)
        made = body(recorder, *tensors, *options)
        if len(_programs) >= MOST:
            _programs.pop(next(iter(_programs)))
        _programs[key] = Program(recorder, made)
        return made


def replay_refusal(device: torch.device) -> str | None:
    """Reason why launches on ``device`` are not replayed, or None if they are; tested once per process and device, see probe.py."""
    if device not in _replay_refusals:
        if capturing():
            return "a CUDA graph is being captured, and whether launches can be replayed was not tested before it"
        _replay_refusals[device] = probe.refusal(device)
    return _replay_refusals[device]


def capturing() -> bool:
    """True if a CUDA graph is being captured, in which no test may run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def off(device: torch.device) -> list[str]:
    """Optimizations that are off for all calls on ``device``, for ``explain``."""
    if INTERPRETED or device.type != "cuda":
        return []
    with on_device(device):
        reason = replay_refusal(device)
    return [] if reason is None else [f"replayed launches: off, because {reason}"]


def set_allocator() -> None:
    """Set the allocator for kernels that make descriptors, those for Hopper, unless one is set in this thread."""
    try:
        from triton.runtime._allocation import NullAllocator, _allocator
    except ImportError:  # those kernels then fail in their test; others need no allocator
        return
    if isinstance(_allocator.get(), NullAllocator):
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))


def _compile(body: Callable[..., Tensors], then: Callable[..., object] | None, like: Tensor, tensors: Tensors, options: tuple) -> None:
    """Compile all kernels of ``body`` and ``then`` in parallel. Errors are ignored here, because the launch reports them."""
    from triton.runtime._async_compile import AsyncCompileMode

    compiler = Compiler(like, tensors)
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        results = body(compiler, *tensors, *options)
        if then is not None:
            then(compiler, results, *tensors, *options)


def _signed(t: Tensor) -> Tensor:
    """Resolve a lazy negation of ``t``, such as that of the imaginary part of a conjugate."""
    return t.resolve_neg() if t.is_neg() else t


def _watched(hook: object) -> bool:
    """True if a profiler has set launch hooks, which only Triton's own launcher calls."""
    return bool(getattr(hook, "calls", hook))
