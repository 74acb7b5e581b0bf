"""Device, dtypes and reference of the kernels' tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops import cases, errors
from tests.ops.cases import Call
from tests.ops.errors import admitted

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs CUDA, or TRITON_INTERPRET=1", allow_module_level=True)
if INTERPRETED:
    from tests.ops.triton import interpreter  # noqa: F401  before any kernel runs

DEVICE = "cpu" if INTERPRETED else "cuda"
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALVES)
SIZE = dict(K=6, V=5) if INTERPRETED else dict(K=64, V=64)  # default sizes, few, to limit compilation
LATER = pytest.mark.slow if INTERPRETED else ()  # slow under the interpreter
EXACT_BACKEND = "reference" if INTERPRETED else "torch"  # faster, and in float64 equal to the reference to 3e-15 of the summands


def first(chosen: Container, rows: Iterable[tuple]) -> list:
    """All ``rows`` of parameters; `make test` runs those whose first entry, or the row, is ``chosen``, a GPU all."""
    return [row if row in chosen or row[0] in chosen else pytest.param(*row, marks=LATER) for row in rows]


def here(call: Call) -> Call:
    """The same call on the device."""
    options = {n: x.to(DEVICE) if isinstance(x, Tensor) else x for n, x in call.options.items()}
    return replace(call, tensors={n: t.to(DEVICE) for n, t in call.tensors.items()}, options=options)


@contextmanager
def poisoned() -> Iterator[None]:
    """Context in which new memory is filled with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def values(call: Call) -> dict[str, Tensor]:
    with poisoned():
        return call("chunk", backend="triton")


def gradients(call: Call, outputs: tuple[str, ...] | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with poisoned():
        return cases.gradients(call, outputs, backend="triton")


def ratios(
    unrounded: Call, dtype: torch.dtype, *, outputs: tuple[str, ...] | None = None, limit: float | None = None,
    decay: torch.dtype | None = None, run: Callable = gradients, capped: bool = True,
) -> dict[str, float]:  # fmt: skip
    """:func:`tests.ops.errors.ratios` of the kernels on the device."""
    return errors.ratios(
        here(unrounded), dtype, run=run, exact=EXACT_BACKEND, outputs=outputs, limit=limit, decay=decay, capped=capped
    )  # fmt: skip


def check(unrounded: Call, dtype: torch.dtype, **how) -> None:
    """Values and the gradients of all arguments, rounded to ``dtype``, are within tolerance."""
    wrong = {name: f"{ratio:.3g} x" for name, ratio in ratios(unrounded, dtype, **how).items() if not ratio <= 1}
    assert not wrong, f"errors of so many times what is allowed: {wrong}"


def check_tame(call: Call, dtype: torch.dtype, **how) -> None:
    """The same, only for a stable recurrence."""
    assert admitted(call.to(dtype))
    check(call, dtype, **how)
