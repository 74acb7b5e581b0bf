"""Definition of the selective scan, token by token. All other backends are tested against this file."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Run ``x``, ``dt`` [B, T, D], ``a`` [D, N], ``b``, ``c`` [B, T, N] from ``h`` [B, D, N]: outputs [B, T, D] and the last state."""
    outputs = [x[:, :0]]
    for t in range(x.shape[1]):
        h = (dt[:, t, :, None] * a).exp() * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        outputs.append((h * c[:, t, None]).sum(-1)[:, None])
    return torch.cat(outputs, 1), h


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run :func:`sequence` on a batch or on packed sequences, from ``initial`` [rows, D, N]."""
    if cu_seqlens is None:
        return sequence(x, dt, a, b, c, initial)
    ends = cu_seqlens.tolist()
    runs = []
    for n, (start, stop) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        own_x, own_dt, own_b, own_c = (t[:, start:stop] for t in (x, dt, b, c))
        runs.append(sequence(own_x, own_dt, a, own_b, own_c, initial[n : n + 1]))
    return torch.cat([x[:, :0]] + [y for y, _ in runs], 1), torch.cat([initial[:0]] + [last for _, last in runs])
