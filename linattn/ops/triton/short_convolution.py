"""Short convolution on a GPU: configurations and launches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from linattn.ops.torch import short_convolution as portable
from linattn.ops.triton import fitting, launch
from linattn.ops.triton import short_convolution_kernels as kernels


class Config(NamedTuple):
    """Channels and warps of a program, tokens of a group that it reads at a time, and groups of a segment."""

    channels: int
    warps: int
    tokens: int
    groups: int


FORWARD = Config(channels=128, warps=1, tokens=8, groups=8)
BACKWARD = Config(channels=128, warps=1, tokens=8, groups=16)
WIDEST = 8  # largest number of taps


def refusal(x: Tensor, weight: Tensor, *_: Tensor | None) -> str | None:
    """Reason why the kernels do not run the call, or None if they do."""
    if torch.float64 in (x.dtype, weight.dtype):
        return "its sums are float32, and float64 was given"
    if not 2 <= weight.shape[2] <= WIDEST:
        return f"it has 2 to {WIDEST} taps, but weight has shape {list(weight.shape)}"
    return fitting.refusal(_name(x, None, weight))


def _name(x: Tensor, before: Tensor | None, weight: Tensor, *_: object) -> Hashable:
    return fitting.alike("short_convolution", x, weight)


def _backward_name(d_y: Tensor, *arguments: Any) -> Hashable:
    return _name(*arguments)


@fitting.or_else(portable.forward, _name)
def forward(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
    """``x`` [B, T, D], not empty, ``before`` [B, W - 1, D], ``weight`` [D, 1, W], ``bias`` [D]: y [B, T, D] in the dtype of ``x``."""
    (y,) = launch.run(_forward, x, (_rows(x), *_contiguous(before, weight, bias)), activation, FORWARD)
    return y


@fitting.or_else(portable.backward, _backward_name)
def backward(
    d_y: Tensor, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of ``x``, ``before``, ``weight`` and ``bias``, each None if the input is None."""
    tensors = (_rows(x), *_contiguous(before, weight, bias), _rows(d_y))
    d_x, d_before, parts = launch.run(_backward, x, tensors, activation, BACKWARD)
    sums = parts.sum((0, 1))  # [W + 1, D]
    d_weight = weight.new_empty(weight.shape).copy_(sums[:-1].t()[:, None])
    return d_x, d_before, d_weight, None if bias is None else sums[-1].to(bias.dtype, copy=True)


def _rows(x: Tensor) -> Tensor:
    """Make channels contiguous; tokens may be further apart, as in a slice of a fused map."""
    return x if x.stride(2) == 1 else x.contiguous()


def _contiguous(*tensors: Tensor | None) -> launch.Tensors:
    return tuple([t if t is None else t.contiguous() for t in tensors])


def _forward(
    recorder: launch.Recorder, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool, config: Config
) -> launch.Tensors:
    batch, tokens, width = x.shape
    y = recorder.empty(batch, tokens, width, dtype=x.dtype)
    span = config.groups * config.tokens
    segments = triton.cdiv(tokens, span)
    _launch(recorder, kernels.forward, config, batch * segments, weight, activation, (x, before, weight, bias, y),
            (*x.stride()[:2], tokens, segments, span))  # fmt: skip
    return (y,)


def _backward(
    recorder: launch.Recorder,
    x: Tensor,
    before: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    d_y: Tensor,
    activation: bool,
    config: Config,
) -> launch.Tensors:
    batch, tokens, width = x.shape
    taps = weight.shape[2]
    span = config.groups * config.tokens - (taps - 1)  # whole groups, including the tokens beyond a segment
    segments = triton.cdiv(tokens, span)
    d_x = recorder.empty(batch, tokens, width, dtype=x.dtype)
    d_before = None if before is None else recorder.empty(*before.shape, dtype=before.dtype)
    parts = recorder.empty(batch, segments, taps + 1, width, dtype=torch.float32)
    tensors = (x, before, weight, bias, d_y, d_x, d_before, parts)
    _launch(recorder, kernels.backward, config, batch * segments, weight, activation, tensors,
            (*x.stride()[:2], *d_y.stride()[:2], tokens, segments, span))  # fmt: skip
    return d_x, d_before, parts


def _launch(
    recorder: launch.Recorder,
    kernel: Any,
    config: Config,
    rows: int,
    weight: Tensor,
    activation: bool,
    tensors: launch.Tensors,
    numbers: tuple[int, ...],
) -> None:
    width, _, taps = weight.shape
    grid = (triton.cdiv(width, config.channels) * rows, 1, 1)
    recorder.launch(
        kernel, grid, tensors, numbers, shape=kernels.Shape(width, taps, config.channels, config.tokens, activation),
        num_warps=config.warps,
    )  # fmt: skip
