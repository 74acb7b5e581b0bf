"""What ends a decoding step on a CPU, each as a kernel: the likeliest tokens, and counters that grow by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.ops.cpu import library


def refusal_of_argmax(x: Tensor) -> str | None:
    """Reason why no kernel takes ``x`` [..., V], or None."""
    if x.dtype not in library.DTYPES:
        return f"it takes float32, bfloat16 and float16, and a tensor is {x.dtype}"
    return _of_memory(x)


def bound_argmax(x: Tensor) -> tuple[Tensor, library.Bound]:
    """Places [...] int64 of the largest numbers of ``x`` [..., V], and the call that computes them from its current numbers.

    The first one of equal ones; a NaN counts as the largest number, as in torch.
    """
    y = torch.zeros(x.shape[:-1], dtype=torch.int64)
    arguments = x, library.DTYPES[x.dtype], y.numel(), x.shape[-1], y
    return y, library.Bound("argmax", library.words(*arguments), arguments)


def refusal_of_increase(counters: Sequence[Tensor]) -> str | None:
    """Reason why no kernel increases ``counters``, or None."""
    wrong = next((t.dtype for t in counters if t.dtype != torch.int64), None)
    if wrong is not None:
        return f"it takes int64, and a tensor is {wrong}"
    return next((reason for t in counters if (reason := _of_memory(t))), None)


def bound_increase(counters: Sequence[Tensor]) -> library.Bound:
    """Call that adds one to every number of ``counters``, without running it."""
    return library.Bound("increase", library.words(len(counters), *(word for t in counters for word in (t, t.numel()))), counters)


def _of_memory(x: Tensor) -> str | None:
    return "it takes contiguous tensors" if not x.is_contiguous() or x.is_neg() else library.refusal(x)
