"""Calls of the CPU kernels of the short convolution, for up to four taps and at most float32."""

from __future__ import annotations

from torch import Tensor

from linattn.ops.cpu import library
from linattn.ops.cpu.library import call, empty, rows

TAPS = 4
SPAN = 256  # tokens of a partial sum of the weight's gradient, as in short_convolution.cpp


def refusal(x: Tensor, weight: Tensor, *others: Tensor | None) -> str | None:
    """Reason why the kernels don't run this call, or None."""
    if weight.shape[2] > TAPS:
        return f"it takes up to {TAPS} taps, and the weight has {weight.shape[2]}"
    return library.refusal(x, weight, *others)


def forward(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
    y, x = empty(x.shape, x.dtype), library.in_rows(x)
    call("short_convolution_forward", activation, *rows(x), *_shared(x, before, weight, bias), *rows(y), *x.shape, weight.shape[2])
    return y


def backward(
    d_y: Tensor, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, activation: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of ``x``, ``before``, ``weight`` and ``bias``, None where those are."""
    (batch, tokens, width), taps = x.shape, weight.shape[2]
    d_x, d_before = empty(x.shape, x.dtype), None if before is None else empty(before.shape, x.dtype)
    parts = empty((batch * -(-tokens // SPAN), taps + 1, width))
    x, d_y = library.in_rows(x), library.in_rows(d_y.to(x.dtype))
    call(
        "short_convolution_backward", activation, *rows(x), *_shared(x, before, weight, bias), *rows(d_y), *rows(d_x), d_before, parts,
        batch, tokens, width, taps,
    )  # fmt: skip
    d_weight = weight.new_empty(weight.shape).copy_(parts[:, :taps].sum(0).t()[:, None])
    return d_x, d_before, d_weight, None if bias is None else parts[:, taps].sum(0).to(bias.dtype)


def _shared(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Convert the tokens before, the weight [W, D] and the bias to the kernels' format."""
    past = None if before is None else before.detach().resolve_neg().to(x.dtype).contiguous()
    return past, library.plain(weight.detach()[:, 0].t()), library.plain(bias)
