"""Calls of the CPU kernels of gates."""

from __future__ import annotations

from torch import Tensor

from linattn.ops import tracing
from linattn.ops.cpu import library
from linattn.ops.cpu.library import call, empty
from linattn.ops.memory import dense


def refusal(gate: Tensor, x: Tensor) -> str | None:
    """Reason why the kernels don't run this call, or None."""
    if gate.dtype != x.dtype or gate.shape != x.shape:
        return "it takes two tensors of one shape and dtype"
    if tracing.traced(gate, x):
        return "tracing is active, which needs PyTorch operations"
    return library.refusal(gate, x)


def forward(gate: Tensor, x: Tensor, swish: bool) -> Tensor:
    gate, x = dense(gate), dense(x)
    y = empty(x.shape, x.dtype)
    call("gated_forward", library.DTYPES[x.dtype], swish, gate, x, y, x.numel())
    return y


def backward(d_y: Tensor, gate: Tensor, x: Tensor, swish: bool) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``x``."""
    d_gate, d_x = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    call("gated_backward", library.DTYPES[x.dtype], swish, dense(gate), dense(x), dense(d_y), d_gate, d_x, x.numel())
    return d_gate, d_x
