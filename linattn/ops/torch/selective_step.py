"""A token of the selective scan in operations of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def step_(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, bias: Tensor | None, z: Tensor | None,
    softplus: bool, limit: tuple[float, float],
) -> Tensor:  # fmt: skip
    """Run :func:`linattn.ops.selective_step.selective_step_`."""
    wide = state.dtype
    token, step = x.to(wide), dt.to(wide)
    step = step if bias is None else step + bias.to(wide)
    step = (F.softplus(step) if softplus else step).clamp(*limit)[..., None]
    if state.ndim == 4:
        b, c = (t.repeat_interleave(state.shape[1] // t.shape[1], 1) for t in (b, c))
    h = torch.exp(step * a.to(wide)) * state + step * token[..., None] * b.to(wide).unsqueeze(-2)
    y = (h * c.to(wide).unsqueeze(-2)).sum(-1)
    y = y if d is None else torch.addcmul(y, token, d.to(wide))
    state.copy_(h)
    return (y if z is None else y * F.silu(z.to(wide))).to(x.dtype)
