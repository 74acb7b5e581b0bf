"""Library of compiled kernels: availability, instruction set, and calls.

The instruction set is chosen at the first call of a kernel: the best of this machine, or a lower one named by
``LINATTN_CPU_ISA`` (``portable``, ``avx2``, ``avx512``, ``avx512bf16``, ``amx``; on ARM ``portable``, ``neonbf16``).
``LINATTN_CPU_SANITIZE=1`` loads the library built by ``python -m linattn.ops.cpu.build --sanitize``.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.compilers import constant_result
from linattn.ops.cpu import build

GUARD = 64  # elements
LARGE = 1 << 18  # elements for which the work exceeds the wake-up of torch's threads, see pool.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbered as in vector.h
_TAKEN = (*DTYPES, torch.int32, torch.int64)
_CPU = torch.device("cpu")
_lowered: str | None = os.environ.get("LINATTN_CPU_ISA")
_guards: list[Tensor] | None = None


@constant_result
def reason() -> str | None:
    """Reason why no kernels are available, or None."""
    return _loaded()[1]


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    if _lowered is not None and _lowered not in build.ISAS:
        return None, f"LINATTN_CPU_ISA must be one of {', '.join(build.ISAS)}, but is {_lowered!r}"
    path = build.library(sanitize=os.environ.get("LINATTN_CPU_SANITIZE") == "1")
    if path is None:
        return None, "its kernels are not compiled: run python -m linattn.ops.cpu.build, which compiles them or reports the problem"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"its kernels cannot be loaded: {error}"
    library.linattn_isa.restype = ctypes.c_int64
    return library, None


@cache
def isas() -> tuple[str, ...]:
    """Instruction sets of both this machine and the library, the best one last."""
    library, missing = _loaded()
    if library is None:
        raise RuntimeError(missing)
    there = list(build.ISAS)[: library.linattn_isa() + 1]
    return tuple(isa for isa in there if hasattr(library, f"linattn_{'linear_attention' if isa in build.TILES else 'lanes'}_{isa}"))


def isa() -> str:
    """Instruction set in use."""
    order = list(build.ISAS)
    return next(x for x in reversed(isas()) if _lowered is None or order.index(x) <= order.index(_lowered))


@contextmanager
def lowered(isa: str) -> Iterator[None]:
    """Context that limits the instruction set to ``isa``, for tests."""
    global _lowered
    before, _lowered = _lowered, isa
    try:
        yield
    finally:
        _lowered = before


@contextmanager
def guarded() -> Iterator[None]:
    """Context for tests in which outputs of kernels start as NaN, between guards that are checked at the end.

    Raises:
        RuntimeError: if a guard was overwritten.
    """
    global _guards
    before, _guards = _guards, []
    try:
        yield
        if not all(bool(guard.isnan().all()) for guard in _guards):
            raise RuntimeError("a kernel wrote outside of its outputs")
    finally:
        _guards = before


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate the output of a kernel."""
    if _guards is None:
        return torch.empty(shape, dtype=dtype)
    around = torch.full((math.prod(shape) + 2 * GUARD,), torch.nan, dtype=dtype)
    _guards.extend((around[:GUARD], around[-GUARD:]))
    return around[GUARD:-GUARD].view(shape)


def like(t: Tensor) -> Callable[..., Tensor]:
    """Equivalent of :func:`empty` for the fake results of operators."""
    return lambda shape, dtype=torch.float32: t.new_empty(shape, dtype=dtype)


def call(name: str, *arguments: Tensor | float | None, numbers: int = 0) -> None:
    """Run the kernel ``name`` of the best instruction set that it is compiled for; the last argument is the number of threads.

    A tensor is passed as the address of its first number (the caller ensures the memory layout), None as the address 0, a bool or
    an int as int64, a float as double. ``numbers`` is the size of the largest tensor that is passed in another form.
    """
    function = _kernel(name, isa())
    if function.argtypes is None:
        function.argtypes = [*map(_type, arguments), ctypes.c_int64]
    values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
    large = max([numbers, *[x.numel() for x in arguments if isinstance(x, Tensor)]]) >= LARGE
    function(*values, -torch.get_num_threads() if large else torch.get_num_threads())


class Bound:
    """Kernel ``name`` with the address of its arguments, for repeated calls; ``keep`` holds the objects that they point to."""

    def __init__(self, name: str, arguments: ctypes.Array, keep: object = None) -> None:
        self.kernel, self.address, self.kept = _kernel(name, isa()), ctypes.addressof(arguments), (arguments, keep)
        self.kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64]

    def __call__(self) -> None:
        self.kernel(self.address, torch.get_num_threads())


def sequence(calls: Sequence[Bound]) -> Callable[[], None]:
    """Function that runs ``calls`` in order, as one call."""
    run = _sequence()
    packed = words(*(number for call in calls for number in (ctypes.cast(call.kernel, ctypes.c_void_p).value, call.address)))

    def step(_kept: object = calls) -> None:
        run(packed, len(calls), torch.get_num_threads())

    return step


@cache
def _sequence() -> Any:
    library, missing = _loaded()
    if library is None:
        raise RuntimeError(missing)
    run = library.linattn_sequence
    run.restype, run.argtypes = None, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return run


def words(*arguments: Tensor | int | None) -> ctypes.Array:
    """``arguments`` in memory as 8 bytes each, a tensor as the address of its first number and None as 0."""
    values = [x.data_ptr() if isinstance(x, Tensor) else int(x or 0) for x in arguments]
    return (ctypes.c_int64 * len(values))(*values)


def in_rows(t: Tensor) -> Tensor:
    """Return ``t`` [B, T, ...] with contiguous tokens."""
    t = t.resolve_neg()
    return t if t[:1, :1].is_contiguous() else t.contiguous()


def rows(t: Tensor) -> tuple[Tensor, int, int, int]:
    """Arguments for LINATTN_ROWS in rows.h of ``t`` [B, T, ...]: its dtype and the strides of batch rows and tokens."""
    return t, DTYPES[t.dtype], t.stride(0), t.stride(1)


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Number of sequences in ``x`` [B, T, ...]."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def plain(t: Tensor | None) -> Tensor | None:
    """Convert ``t`` to contiguous float32, unless it is None."""
    return None if t is None else t.detach().resolve_neg().to(torch.float32).contiguous()


def ends(cu_seqlens: Tensor | None) -> Tensor | None:
    """Convert ``cu_seqlens`` to the kernels' format."""
    return None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()


@cache
def _kernel(name: str, isa: str) -> Any:
    library, missing = _loaded()
    if library is None:
        raise RuntimeError(missing)
    order = list(build.ISAS)
    lower = [f"linattn_{name}_{x}" for x in reversed(order[: order.index(isa) + 1])]
    function = getattr(library, next(x for x in lower if hasattr(library, x)))  # most kernels have no version with bfloat16 products
    function.restype = None
    return function


def _type(argument: Tensor | float | None) -> type:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p
    return ctypes.c_double if isinstance(argument, float) else ctypes.c_int64


def refusal(*tensors: Tensor | None) -> str | None:
    """Reason why no kernel of any operation takes ``tensors``, or None."""
    wrong = None
    for t in tensors:
        if t is None:
            continue
        if t.device != _CPU:
            return "it runs on the CPU only"
        if t.dtype not in _TAKEN:
            wrong = wrong or f"it takes float32, bfloat16 and float16, and a tensor is {t.dtype}"
    return wrong or tracing.refusal() or reason()
