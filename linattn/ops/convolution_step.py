"""Decoding step of the short convolution, which updates its state in place."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from linattn.ops import checks, dispatch, steps, tracing
from linattn.ops.torch import convolution_step as portable


def step(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool) -> tuple[Tensor, Tensor]:
    """Compute :func:`step_` without writing to ``state``: y [B, 1, D] and the next state [B, S, D]."""
    found: tuple[Tensor, Tensor] = _step(x, state, weight, bias, activation)
    return found


def step_(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, size: int = 0, normed: int = 0, eps: float = 0.0,
    overlapped: bool = False,
) -> Tensor:  # fmt: skip
    """``silu(bias + Σ_i weight_i x_i)`` over the last tokens of ``state`` [B, S, D] and ``x`` [B, 1, D], which is appended to the state.

    ``weight`` is [D, 1, W], W at least 2 and at most S + 1; the first ``normed`` channels, in heads of ``size``, are divided by
    √(Σ y² + eps). [B, 1, D].

    ``overlapped``: on Hopper read the state while earlier launches may still run; only valid if none of them writes to it.
    """
    batch, slots, width = state.shape
    if x.shape != (batch, 1, width) or weight.shape[:2] != (width, 1) or not 2 <= weight.shape[2] <= slots + 1:
        raise ValueError(f"x, state and weight must be [B, 1, D], [B, S, D] and [D, 1, W] with W of 2 to S + 1, but came with "
                         f"{list(x.shape)}, {list(state.shape)} and {list(weight.shape)}")  # fmt: skip
    if bias is not None and bias.shape != (width,):
        checks.shape("bias", bias, "[D]", (width,))
    name = dispatch.choose("auto", _refusal, x, state, weight, bias, size, normed)
    run = portable.step_ if name == "torch" else _load(name).step_
    return cast(Tensor, run(x, state, weight, bias, activation, size, normed, eps, overlapped))


def _run(x: Tensor, state: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    after = state.clone(memory_format=torch.contiguous_format)
    return step_(x, after, *others), after


_step = steps.define(
    "convolution_step", "(Tensor x, Tensor state, Tensor weight, Tensor? bias, bool activation) -> (Tensor y, Tensor next)", _run,
    lambda x, state, *_: (x.new_empty(x.shape), state.new_empty(state.shape)),
    steps.Step(step_, {"state": "next"}, {"overlapped": True}),  # each state occurs once in a step, and steps run one after the other
)  # fmt: skip


def _load(name: str) -> ModuleType:
    if name == "cpu":
        from linattn.ops.cpu import convolution_step as native

        return native
    from linattn.ops.triton import convolution_step as kernels

    return kernels


def _refusal(name: str, asked: bool, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *others: int) -> str | None:
    if name in ("cpu", "triton") and tracing.wanted(x, weight, bias):
        return "it has no gradients"
    return dispatch.refusal(name, asked, x, _load, (x, state, weight, bias, *others))


def _explained(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, size: int, normed: int, **_: Any
) -> dispatch.Explained:  # fmt: skip
    return dispatch.explained(step_, x, _refusal, x, state, weight, bias, size, normed)


dispatch.explains(step_, _explained)
