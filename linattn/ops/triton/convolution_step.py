"""Decoding step of the short convolution on a GPU in one launch: sum, SiLU, norm of heads, and the state updated in place."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops import gpu
from linattn.ops.torch import convolution_step as portable
from linattn.ops.triton import fitting, launch
from linattn.ops.triton.recurrences import LOG2E, _exp2

BLOCK = 128  # channels of a program, unless heads are normed
ROWS = 4  # rows of a program, so that it reads the weight once for all of them, if there are PROGRAMS of one row each
PROGRAMS = 4096
MOST = 65535  # most rows, CUDA's limit of a grid's second dimension


class Shape(NamedTuple):
    """Constants of a step."""

    D: int  # channels
    S: int  # tokens of the state
    W: int  # taps
    RB: int  # rows and channels of a program
    DB: int
    NORMED: int  # channels in heads of DB that are divided by their lengths
    ACTIVATION: bool
    OVERLAPPED: bool


@triton.jit(do_not_specialize=["rows"])
def step_kernel(x, state, weight, bias, y, rows, x_row, state_row, state_slot, state_channel, eps, shape: tl.constexpr):
    """Tensors other than x are read first."""
    D: tl.constexpr = shape.D
    S: tl.constexpr = shape.S
    W: tl.constexpr = shape.W
    RB: tl.constexpr = shape.RB
    DB: tl.constexpr = shape.DB
    NORMED: tl.constexpr = shape.NORMED
    if shape.OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    row, d = (tl.program_id(1) * RB + tl.arange(0, RB))[:, None], (tl.program_id(0) * DB + tl.arange(0, DB))[None, :]
    real = d < D
    there = (row < rows) & real
    row = row.to(tl.int64)
    place = state + row * state_row + d * state_channel
    total = tl.zeros([RB, DB], tl.float32)
    if bias is not None:
        total += tl.load(bias + d, mask=real, other=0.0).to(tl.float32)
    for i in tl.static_range(S):
        past = tl.load(place + i * state_slot, mask=there, other=0.0)
        if i > S - W:
            total += tl.load(weight + d * W + i + W - 1 - S, mask=real, other=0.0).to(tl.float32) * past.to(tl.float32)
        if i > 0:
            tl.store(place + (i - 1) * state_slot, past, mask=there)
    last = tl.load(weight + d * W + W - 1, mask=real, other=0.0).to(tl.float32)
    if shape.OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    new = tl.load(x + row * x_row + d, mask=there, other=0.0)
    tl.store(place + (S - 1) * state_slot, new.to(state.dtype.element_ty), mask=there)
    out = total + last * new.to(tl.float32)
    if shape.ACTIVATION:
        out = out / (1.0 + _exp2(-out * LOG2E))
    if NORMED > 0:
        length = tl.sqrt_rn(tl.sum(tl.where(there, out * out, 0.0), 1) + eps)[:, None]
        out = tl.where(d < NORMED, out / length, out)
    tl.store(y + row * D + d, out.to(y.dtype.element_ty), mask=there)


def refusal(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, size: int, normed: int) -> str | None:
    """Reason why the kernel does not run a step, or None if it does."""
    if x.dtype == torch.float64:
        return "its sums are float32, and float64 was given"
    if x.stride(2) != 1 or size & (size - 1):
        return "channels must be contiguous, and sizes of heads powers of two"
    if state.is_neg():
        return "the state is a negated view (torch's lazy negation), and is updated in place"
    if state.shape[0] > MOST:
        return f"it takes at most {MOST} rows at a time, and there are {state.shape[0]}"
    return fitting.refusal(_name(x, state, weight))


def _name(x: Tensor, state: Tensor, weight: Tensor, *_: object) -> Hashable:
    return fitting.alike("convolution_step", x, weight)


@fitting.or_else(portable.step_, _name)
def step_(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, size: int, normed: int, eps: float, overlapped: bool
) -> Tensor:
    """Run :func:`linattn.ops.convolution_step.step_`; ``size`` is 0 or a power of two that divides ``normed``."""
    overlapped = overlapped and gpu.capability(x.device) >= (9, 0)
    bias = None if bias is None else bias.contiguous()
    return launch.run(_step, x, (x, state, weight.contiguous(), bias), activation, size, normed, eps, overlapped)[0]


def _step(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    x, state, weight, bias, activation, size, normed, eps, overlapped = arguments
    (rows, slots, width), DB = state.shape, size or BLOCK
    RB = ROWS if triton.cdiv(width, DB) * rows >= PROGRAMS else 1
    y = recorder.empty(rows, 1, width, dtype=x.dtype)
    options: dict[str, Any] = {"launch_pdl": True} if overlapped else {}
    recorder.launch(
        step_kernel, (triton.cdiv(width, DB), triton.cdiv(rows, RB), 1), (x, state, weight, bias, y),
        (rows, x.stride(0), *state.stride(), eps), shape=Shape(width, slots, weight.shape[2], RB, DB, normed, activation, overlapped),
        num_warps=1 if DB <= 128 else 4, **options,
    )  # fmt: skip
    return (y,)
