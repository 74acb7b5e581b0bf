"""Decoding step of the selective scan in operations of torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Step(NamedTuple):
    """A call of :func:`linattn.ops.selective_step.selective_step_`: the tensors, and how ``dt`` becomes Δ."""

    state: Tensor
    x: Tensor
    dt: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    z: Tensor | None
    softplus: bool = False
    limit: tuple[float, float] = (0.0, math.inf)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All but the options; None for tensors that the call does not have."""
        return self[:9]


def step_(call: Step) -> Tensor:
    """Run :func:`linattn.ops.selective_step.selective_step_`."""
    state, x, dt, bias, a, b, c, d, z, softplus, limit = call
    compute_dtype = state.dtype
    token, step = x.to(compute_dtype), dt.to(compute_dtype)
    step = step if bias is None else step + bias.to(compute_dtype)
    step = (F.softplus(step) if softplus else step).clamp(*limit)[..., None]
    if state.ndim == 4:
        b, c = (t.repeat_interleave(state.shape[1] // t.shape[1], 1) for t in (b, c))
    h = torch.exp(step * a.to(compute_dtype)) * state + step * token[..., None] * b.to(compute_dtype).unsqueeze(-2)
    y = (h * c.to(compute_dtype).unsqueeze(-2)).sum(-1)
    y = y if d is None else torch.addcmul(y, token, d.to(compute_dtype))
    state.copy_(h)
    return (y if z is None else y * F.silu(z.to(compute_dtype))).to(x.dtype)
