"""Gates on a GPU: one kernel each way, which reads and writes each number once. The backward pass forms the gate again from the inputs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.memory import dense
from linattn.ops.torch.gated import gated as portable
from linattn.ops.triton import fitting, launch
from linattn.ops.triton.recurrences import LOG2E, _exp2

NUMBERS = 4096  # of a program


@triton.jit
def _place(count, NUMBERS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    return place, place < count


@triton.jit
def forward_kernel(gate, x, y, count, SWISH: tl.constexpr, NUMBERS: tl.constexpr):
    place, there = _place(count, NUMBERS)
    g = tl.load(gate + place, mask=there, other=0.0).to(tl.float32)
    out = tl.load(x + place, mask=there, other=0.0).to(tl.float32) / (1.0 + _exp2(-g * LOG2E))
    if SWISH:
        out *= g
    tl.store(y + place, out.to(y.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(d_y, gate, x, d_gate, d_x, count, SWISH: tl.constexpr, NUMBERS: tl.constexpr):
    place, there = _place(count, NUMBERS)
    g = tl.load(gate + place, mask=there, other=0.0).to(tl.float32)
    d = tl.load(d_y + place, mask=there, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + _exp2(-g * LOG2E))
    of_x = d * s
    of_gate = of_x * tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    if SWISH:
        of_x *= g
        of_gate *= 1.0 + g * (1.0 - s)
    else:
        of_gate *= 1.0 - s
    tl.store(d_gate + place, of_gate.to(d_gate.dtype.element_ty), mask=there)
    tl.store(d_x + place, of_x.to(d_x.dtype.element_ty), mask=there)


def refusal(gate: Tensor, x: Tensor) -> str | None:
    """Reason why the kernels do not run this call, or None."""
    if gate.dtype != x.dtype or gate.shape != x.shape or x.device != gate.device:
        return "it takes two tensors of one shape, dtype and device"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not x.numel():
        return f"its results are float32 or half precision, and not empty, but x is {x.dtype} {list(x.shape)}"
    if tracing.traced(gate, x):
        return "tracing is active, which needs PyTorch operations"
    return fitting.refusal(_name(gate))


def _name(gate: Tensor, *_: object) -> Hashable:
    return "gated", gate.device, gate.dtype


def _portable_backward(d_y: Tensor, gate: Tensor, x: Tensor, swish: bool) -> tuple[Tensor | None, ...]:
    return tuple(fitting.differentiated(lambda gate, x: (portable(gate, x, swish),), (gate, x), (d_y,)))


@fitting.or_else(portable, _name)
def forward(gate: Tensor, x: Tensor, swish: bool) -> Tensor:
    (y,) = launch.run(_forward, x, (dense(gate), dense(x)), swish)
    return y


@fitting.or_else(_portable_backward, lambda _, gate, *__: _name(gate))
def backward(d_y: Tensor, gate: Tensor, x: Tensor, swish: bool) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``x``."""
    d_gate, d_x = launch.run(_backward, x, (dense(d_y), dense(gate), dense(x)), swish)
    return d_gate, d_x


def _forward(recorder: launch.Recorder, gate: Tensor, x: Tensor, swish: bool) -> launch.Tensors:
    y = recorder.empty(*x.shape, dtype=x.dtype)
    _launch(recorder, forward_kernel, (gate, x, y), swish)
    return (y,)


def _backward(recorder: launch.Recorder, d_y: Tensor, gate: Tensor, x: Tensor, swish: bool) -> launch.Tensors:
    d_gate, d_x = (recorder.empty(*x.shape, dtype=x.dtype) for _ in "gx")
    _launch(recorder, backward_kernel, (d_y, gate, x, d_gate, d_x), swish)
    return d_gate, d_x


def _launch(recorder: launch.Recorder, kernel: Any, tensors: launch.Tensors, swish: bool) -> None:
    count = tensors[-1].numel()
    recorder.launch(kernel, (triton.cdiv(count, NUMBERS), 1, 1), tensors, (count,), SWISH=swish, NUMBERS=NUMBERS, num_warps=8)
