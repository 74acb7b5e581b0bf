"""Decoding step of the short convolution on a CPU, which updates its state in place."""

from __future__ import annotations

from torch import Tensor

from linattn.ops import memory, tracing
from linattn.ops.cpu import library
from linattn.ops.cpu.selective_step import constant


def refusal(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, _: int, normed: int) -> str | None:
    """Reason why the kernel does not run a step, or None if it does."""
    if normed:
        return "it does not normalize heads"
    if state.dtype != x.dtype:
        return f"the state is {state.dtype} beside tokens of {x.dtype}"
    if tracing.traced(x, state, weight, bias):
        return "tracing is active, which needs PyTorch operations"
    return memory.turned(x, state, weight, bias) or library.refusal(x, state, weight, bias)


def step_(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, *_options: object) -> Tensor:
    """Run :func:`linattn.ops.convolution_step.step_` without normalized heads."""
    y, run = bound(x, state, weight, bias, activation)
    run()
    return y


def bound(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool) -> tuple[Tensor, library.Bound]:
    """Bind :func:`step_` to its arguments: the result, which is empty, and a function that fills it and updates the state when called."""
    (batch, _, width), taps = x.shape, weight.shape[2]
    y = library.empty(x.shape, x.dtype)
    row, slot, channel = state.stride()
    arguments = (
        x, library.DTYPES[x.dtype], x.stride(0), 0, x.stride(2), state, row, slot, channel, state.shape[1],
        weight, library.DTYPES[weight.dtype], weight.stride(2), 0, weight.stride(0), *constant(bias), y, batch, width, taps, activation,
    )  # fmt: skip
    return y, library.Bound("convolution_step", library.words(*arguments), arguments)
