"""Decoding step of the selective scan on a GPU in one launch: time step, state updated in place, output and gate."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn.ops.torch import selective_step as portable
from linattn.ops.triton import fitting, launch
from linattn.ops.triton.decode import _factor, _fade, _power_of_two
from linattn.ops.triton.recurrences import LOG2E, _exp2

LARGEST = 1024  # N
MOST = 65535  # most rows, CUDA's limit of a grid's second dimension
NUMBERS = 1024  # elements of a program's tile, with one warp


@triton.jit
def _softplus(x):
    """log(1 + e^x), accurate for small results too, by log(1 + t) = 2 artanh(t / (2 + t))."""
    t = _exp2(-tl.abs(x) * LOG2E)
    s = t / (2.0 + t)
    q = s * s
    p = tl.full(x.shape, 1.0 / 15, tl.float32)
    for i in tl.static_range(13, 0, -2):
        p = p * q + 1.0 / i
    return tl.where(x > 0.0, x, 0.0) + 2.0 * s * p


@triton.jit
def step_kernel(
    state, x, dt, a, b, c, d, bias, z, y,
    state_row, state_head, state_channel, state_number, x_row, x_head, x_channel, dt_row, dt_head, dt_channel, a_head, a_channel, a_number,
    b_row, b_group, b_number, c_row, c_group, c_number, d_head, d_channel, bias_head, bias_channel, z_row, z_head, z_channel, low, high,
    H: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """Update PB channels of one head and row; shared tensors have strides of 0."""
    row, h = tl.program_id(1).to(tl.int64), tl.program_id(2)
    p, n = tl.program_id(0) * PB + tl.arange(0, PB), tl.arange(0, NB)
    in_p, in_n = p < P, n < N
    inside = in_p[:, None] & in_n[None, :]
    place = state + row * state_row + h * state_head + p[:, None] * state_channel + n[None, :] * state_number
    own = tl.load(place, mask=inside, other=0.0)
    decay = tl.load(a + h * a_head + p[:, None] * a_channel + n[None, :] * a_number, mask=inside, other=0.0)
    token = tl.load(x + row * x_row + h * x_head + p * x_channel, mask=in_p, other=0.0).to(tl.float32)
    step = tl.load(dt + row * dt_row + h * dt_head + p * dt_channel, mask=in_p, other=0.0).to(tl.float32)
    write = tl.load(b + row * b_row + h // GROUP * b_group + n * b_number, mask=in_n, other=0.0).to(tl.float32)
    read = tl.load(c + row * c_row + h // GROUP * c_group + n * c_number, mask=in_n, other=0.0).to(tl.float32)
    if bias is not None:
        step += tl.load(bias + h * bias_head + p * bias_channel, mask=in_p, other=0.0).to(tl.float32)
    if SOFTPLUS:
        step = _softplus(step)
    step = tl.where(step < low, low, tl.where(step > high, high, step))
    keep, rest = _factor(step[:, None] * decay.to(tl.float32))
    own = _fade(own, keep, rest, (step * token)[:, None] * write[None, :])
    tl.store(place, own, mask=inside)
    out = tl.sum(own * read[None, :], 1)
    if d is not None:
        out += token * tl.load(d + h * d_head + p * d_channel, mask=in_p, other=0.0).to(tl.float32)
    if z is not None:
        gate = tl.load(z + row * z_row + h * z_head + p * z_channel, mask=in_p, other=0.0).to(tl.float32)
        out *= gate / (1.0 + _exp2(-gate * LOG2E))
    tl.store(y + (row * H + h) * P + p, out.to(y.dtype.element_ty), mask=in_p)


def refusal(state: Tensor, *_: Tensor | None) -> str | None:
    """Reason why the kernel does not run a step, or None if it does."""
    if state.dtype != torch.float32:
        return f"its states are float32, and that of this call is {state.dtype}"
    if not 1 <= state.shape[-1] <= LARGEST or state.numel() == 0:
        return f"a channel can have 1 to {LARGEST} numbers, and there are rows, but the state has shape {list(state.shape)}"
    if state.is_neg():
        return "the state is a negated view (torch's lazy negation), and is updated in place"
    if state.shape[0] > MOST:
        return f"it takes at most {MOST} rows at a time, and there are {state.shape[0]}"
    return fitting.refusal(_alike(state))


def _name(call: portable.Step) -> Hashable:
    return _alike(call.state)


def _alike(state: Tensor) -> Hashable:
    """Key of a call in the record of kernels that do not fit."""
    return fitting.alike("selective_step", state)


@fitting.or_else(portable.step_, _name)
def step_(call: portable.Step) -> Tensor:
    """Run :func:`linattn.ops.selective_step.selective_step_`."""
    return launch.run(_step, call.x, call.tensors, call.softplus, *map(float, call.limit))[0]


def _step(recorder: launch.Recorder, *arguments: Any) -> launch.Tensors:
    state, x, dt, bias, a, b, c, d, z, softplus, low, high = arguments
    y = recorder.empty(*x.shape, dtype=x.dtype)
    heads = state.shape[1] if state.ndim == 4 else 1
    rows, (width, size) = state.shape[0], state.shape[-2:]
    NB = _power_of_two(size)
    PB = max(1, min(NUMBERS // NB, _power_of_two(width)))
    numbers = (
        *_strides(state, 4), *_strides(x, 3), *_strides(dt, 3), *_heads(a, 3), *_strides(b, 3), *_strides(c, 3), *_heads(d, 2),
        *_heads(bias, 2), *_strides(z, 3), low, high,
    )  # fmt: skip
    recorder.launch(
        step_kernel, (triton.cdiv(width, PB), rows, heads), (state, x, dt, a, b, c, d, bias, z, y), numbers,
        H=heads, GROUP=heads // b.shape[1] if b.ndim == 3 else 1, P=width, N=size, PB=PB, NB=NB, SOFTPLUS=softplus, num_warps=1,
        **launch.UNFUSED,
    )  # fmt: skip
    return (y,)


def _strides(t: Tensor | None, count: int) -> tuple[int, ...]:
    """Strides of rows, heads (0 without heads) and the rest."""
    if t is None:
        return (0,) * count
    row, *rest = t.stride()
    return (row, *(0,) * (count - t.ndim), *rest)


def _heads(t: Tensor | None, count: int) -> tuple[int, ...]:
    """Strides of heads (0 without heads) and the rest, of a tensor that all rows share."""
    return (0,) * count if t is None else (*(0,) * (count - t.ndim), *t.stride())
