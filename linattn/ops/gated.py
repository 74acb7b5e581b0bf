"""Door of the gate of SwiGLU.

On a CPU, while nobody looks on, it is one kernel forward and one backward, which starts from the two inputs alone; elsewhere it is
written as operations of torch, which compilers and the captured step of decoding fuse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated(gate: Tensor, x: Tensor) -> Tensor:
    """``silu(gate) ⊙ x``, both [...] of any one shape; the kernels round the result once."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        from linattn.ops.cpu import gated as cpu
        from linattn.ops.cpu import library

        if cpu.refusal(gate, x) is None:  # the same with gradients and without: what is run again in a backward pass has to meet it
            return Gated.apply(gate, x) if library.wanted(gate, x) else cpu.forward(gate, x)
    return portable(gate, x)


def portable(gate: Tensor, x: Tensor) -> Tensor:
    """The definition, in operations of torch."""
    return F.silu(gate) * x


class Gated(torch.autograd.Function):
    """The kernels; who asks for a second derivative gets it from the definition."""

    @staticmethod
    def forward(ctx, gate: Tensor, x: Tensor) -> Tensor:
        from linattn.ops.cpu import gated as cpu

        ctx.save_for_backward(gate, x)
        return cpu.forward(gate, x)

    @staticmethod
    def backward(ctx, d_y: Tensor):
        from linattn.ops.cpu import gated as cpu
        from linattn.ops.cpu import library

        gate, x = ctx.saved_tensors
        if torch.is_grad_enabled() or library.traced(d_y):
            s = torch.sigmoid(gate)
            return d_y * x * s * (1 + gate * (1 - s)), d_y * gate * s
        return cpu.backward(d_y, gate, x)
