"""Short convolution by products with shifted inputs: as one expression, and in blocks with a hand-written gradient.

The expression is for compilers, transforms and second derivatives. Eager mode uses blocks: a block and its products fit the cache of
a processor, and only the inputs are saved for backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1 << 16  # numbers of a block, which fits the cache with its products


def shifted(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
    """Compute y [B, T, D] from ``x`` [B, T, D], ``before`` [B, W - 1, D], ``weight`` [D, 1, W], ``bias`` [D]."""
    tokens, past = x.shape[1], weight.shape[2] - 1
    longer = F.pad(x, (0, 0, past, 0)) if before is None else torch.cat([before, x], 1)
    taps = _taps(x, weight)
    y = longer[:, past:] * taps[past]
    for i in range(past):
        y = y + longer[:, i : i + tokens] * taps[i]
    y = y if bias is None else y + bias
    return (F.silu(y) if activation else y).to(x.dtype)


def forward(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
    out, taps = torch.empty_like(x, memory_format=torch.contiguous_format), _taps(x, weight)
    for rows, start, stop in _blocks(x):
        z = _convolved(_window(x, before, rows, start, stop, taps), taps, bias)
        out[rows, start:stop] = F.silu(z, inplace=True) if activation else z
    return out


def backward(
    d_y: Tensor, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of ``x``, ``before``, ``weight`` and ``bias``, None where those are."""
    taps, tokens, past = _taps(x, weight), x.shape[1], weight.shape[2] - 1
    d_x, d_taps = torch.empty_like(x, memory_format=torch.contiguous_format), torch.zeros_like(taps)
    d_before = None if before is None else torch.empty_like(before, memory_format=torch.contiguous_format)
    total = torch.zeros_like(taps[0])
    for rows, start, stop in _blocks(x):
        own, end = stop - start, min(stop + past, tokens)  # later outputs depend on inputs of this block
        seen = _window(x, before, rows, start, end, taps)
        d_z = d_y[rows, start:end].to(taps.dtype)
        if activation:
            d_z = torch.ops.aten.silu_backward(d_z, _convolved(seen, taps, bias))
        for i in range(past + 1):
            d_taps[i] += (d_z[:, :own] * seen[:, i : i + own]).sum((0, 1))
        if bias is not None:
            total += d_z[:, :own].sum((0, 1))
        d_x[rows, start:stop] = _gathered(d_z, taps, own)
        if d_before is not None and start == 0:
            d_before[rows] = _gathered(F.pad(d_z, (0, 0, past, 0)), taps, past)
    d_weight = weight.new_empty(weight.shape).copy_(d_taps.t()[:, None])
    return d_x, d_before, d_weight, None if bias is None else total.to(bias.dtype)


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """Weights [W, D] in float32 (float64 for float64)."""
    compute_dtype = torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32
    return weight[:, 0].t().to(compute_dtype).contiguous()  # contiguous channels are twice as fast


def _blocks(x: Tensor) -> Iterator[tuple[slice, int, int]]:
    """Iterate over the rows, first token and end of each block; a single block except on a CPU."""
    batch, tokens, width = x.shape
    block = BLOCK if x.device.type == "cpu" else x.numel()
    span = min(tokens, max(1, block // width))
    together = max(1, block // (span * width))
    for row in range(0, batch, together):
        for start in range(0, tokens, span):
            yield slice(row, row + together), start, min(start + span, tokens)


def _window(x: Tensor, before: Tensor | None, rows: slice, start: int, stop: int, taps: Tensor) -> Tensor:
    """Tokens from W - 1 before ``start`` up to ``stop``, in float32 (float64 for float64)."""
    past = taps.shape[0] - 1
    seen = x[rows, max(start - past, 0) : stop].to(taps.dtype)
    if start >= past:
        return seen
    if before is None:
        return F.pad(seen, (0, 0, past - start, 0))
    return torch.cat([before[rows, start:].to(taps.dtype), seen], 1)


def _convolved(seen: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    past = taps.shape[0] - 1
    tokens = seen.shape[1] - past
    z = seen[:, past:] * taps[past]
    for i in range(past):
        z.addcmul_(seen[:, i : i + tokens], taps[i])
    return z if bias is None else z.add_(bias)


def _gathered(d_z: Tensor, taps: Tensor, own: int) -> Tensor:
    """Compute gradients of the first ``own`` tokens from their outputs and the next W - 1, if these exist."""
    past = taps.shape[0] - 1
    d_x = d_z[:, :own] * taps[past]
    for ahead in range(1, past + 1):
        there = min(own, d_z.shape[1] - ahead)
        if there > 0:
            d_x[:, :there].addcmul_(d_z[:, ahead : ahead + there], taps[past - ahead])
    return d_x
