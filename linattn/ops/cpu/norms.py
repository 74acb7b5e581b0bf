"""Calls of the CPU kernels of norms over a head's channels, for at most float32."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.cpu import library
from linattn.ops.cpu.library import call, empty

WIDEST = 1024  # as in norms.cpp
SPAN = 64  # tokens of a partial sum of the weight's gradient, as in norms.cpp
NOTHING = (None, 0, 0, 0)


def refusal(x: Tensor, weight: Tensor | None, gate: Tensor | None, dtype: torch.dtype) -> str | None:
    """Reason why the kernels don't run this call, or None."""
    if dtype not in library.DTYPES:
        return f"it returns float32, bfloat16 and float16, but {dtype} is requested"
    if x.numel() == 0 or x.shape[-1] > WIDEST:
        return f"it takes 1 to {WIDEST} channels and at least one token"
    if tracing.traced(x, weight, gate):
        return "tracing is active, which needs PyTorch operations"
    return library.refusal(x, weight, gate)


def forward(x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool, dtype: torch.dtype) -> Tensor:
    y = empty(x.shape, dtype)
    each = weight is not None and weight.ndim == 2
    sizes = _in_heads(x, each).shape
    call(
        "norm_forward", *_rows(x, each), *_rows(gate, each), library.plain(weight), *_rows(y, each), 1 / sizes[3] if mean else 1.0, eps,
        *sizes, sizes[2] if each else 1,
    )  # fmt: skip
    return y


def backward(
    d_y: Tensor, x: Tensor, weight: Tensor | None, gate: Tensor | None, eps: float, mean: bool,
    dtype: torch.dtype,  # noqa: ARG001  that of y, and so of d_y
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of ``x``, ``weight`` and ``gate``, None where those are."""
    d_x, d_gate = empty(x.shape, x.dtype), None if gate is None else empty(gate.shape, gate.dtype)
    each = weight is not None and weight.ndim == 2
    batch, tokens, heads, size = sizes = _in_heads(x, each).shape
    own = heads if each else 1
    parts = None if weight is None else empty((batch * -(-tokens // SPAN), own, size))
    call(
        "norm_backward", *_rows(x, each), *_rows(gate, each), library.plain(weight), *_rows(d_y, each), *_rows(d_x, each),
        *_rows(d_gate, each), parts, 1 / size if mean else 1.0, eps, *sizes, own,
    )  # fmt: skip
    d_weight = None if weight is None or parts is None else parts.sum(0).view(weight.shape).to(weight.dtype)
    return d_x, d_weight, d_gate


def _in_heads(t: Tensor, each: bool) -> Tensor:
    """View ``t`` as [B, T, H, V] with contiguous tokens; H is 1 unless heads have separate weights."""
    if t.ndim == 3:
        t = t[None] if each else t[:, :, None]
    elif t.ndim != 4:
        t = t.reshape(1, -1, t.shape[-2] if each else 1, t.shape[-1])
    return library.in_rows(t)


def _rows(t: Tensor | None, each: bool) -> tuple[Tensor | None, int, int, int]:
    return NOTHING if t is None else library.rows(_in_heads(t, each))
