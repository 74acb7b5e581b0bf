"""Decoding step of the selective scan on a CPU, which updates its state in place."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.ops import memory
from linattn.ops.cpu import library
from linattn.ops.torch.selective_step import Step

MOST = 256  # numbers of a channel's state, as in steps.cpp
Place = tuple[Tensor | None, int, int, int, int]
NOTHING: Place = (None, 0, 0, 0, 0)


def refusal(state: Tensor, *others: Tensor | None) -> str | None:
    """Reason why the kernel does not run a step, or None if it does."""
    if state.dtype != torch.float32:
        return f"its states are float32, and that of this call is {state.dtype}"
    if state.shape[-1] > MOST:
        return f"it takes states of up to N = {MOST} numbers, but there are {state.shape[-1]}"
    if 1 not in state.stride()[-2:]:
        return "neither the channels nor the numbers of the state are contiguous"
    return memory.turned(state, *others) or library.refusal(state, *others)


def step_(step: Step) -> Tensor:
    """Run :func:`linattn.ops.selective_step.selective_step_`."""
    state, x, dt, bias, a, b, c, d, z, softplus, limit = step
    y = library.empty(x.shape, x.dtype)
    a = a if a.dtype == torch.float32 else a.float()
    b, c = (t if t.stride(-1) == 1 else t.contiguous() for t in (b, c))
    batch, size, heads = state.shape[0], state.shape[-1], state.shape[1] if state.ndim == 4 else 1
    group = heads // b.shape[1] if b.ndim == 3 else 1
    row, *steps = state.stride()
    library.call(
        "selective_step", state, row, *_in_heads(steps, 3), a, *_in_heads(a.stride(), 3), *_token(x), *_token(dt), *_token(b), *_token(c),
        *constant(d), *constant(bias), *_token(z), y, batch, heads, state.shape[-2], size, group, softplus, *map(float, limit),
    )  # fmt: skip
    return y


def _in_heads(strides: tuple[int, ...] | list[int], count: int) -> tuple[int, ...]:
    """Pad strides in front with 0 to ``count``, for tensors without heads."""
    return (*(0,) * (count - len(strides)), *strides)


def _token(t: Tensor | None) -> Place:
    """Address, dtype and strides of [B, D] or [B, H, P]."""
    if t is None:
        return NOTHING
    row, *rest = t.stride()
    return t, library.DTYPES[t.dtype], row, *_in_heads(rest, 2)  # type: ignore[return-value]


def constant(t: Tensor | None) -> Place:
    """Address, dtype and strides of [D] or [H, P]."""
    return NOTHING if t is None else (t, library.DTYPES[t.dtype], 0, *_in_heads(t.stride(), 2))  # type: ignore[return-value]
