"""Door of gates: that of SwiGLU, and a sigmoid.

On a CPU, while nobody looks on, it is one kernel forward and one backward, which starts from the two inputs alone; elsewhere it is
written as operations of torch, which compilers and the captured step of decoding fuse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import tracing


def gated(gate: Tensor, x: Tensor, *, swish: bool = True) -> Tensor:
    """``silu(gate) ⊙ x``, without ``swish`` ``sigmoid(gate) ⊙ x``, both [...] of any one shape; the kernels round the result once."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        from linattn.ops.cpu import gated as cpu

        if cpu.refusal(gate, x) is None:  # the same with gradients and without: what is run again in a backward pass has to meet it
            return Gated.apply(gate, x, swish) if tracing.wanted(gate, x) else cpu.forward(gate, x, swish)
    return portable(gate, x, swish)


def portable(gate: Tensor, x: Tensor, swish: bool = True) -> Tensor:
    """The definition, in operations of torch."""
    return (F.silu(gate) if swish else torch.sigmoid(gate)) * x


class Gated(torch.autograd.Function):
    """The kernels; who asks for a second derivative gets it from the definition."""

    @staticmethod
    def forward(ctx, gate: Tensor, x: Tensor, swish: bool = True) -> Tensor:
        from linattn.ops.cpu import gated as cpu

        ctx.save_for_backward(gate, x)
        ctx.swish = swish
        return cpu.forward(gate, x, swish)

    @staticmethod
    def backward(ctx, d_y: Tensor):
        from linattn.ops.cpu import gated as cpu

        gate, x = ctx.saved_tensors
        if torch.is_grad_enabled() or tracing.traced(d_y):
            s = torch.sigmoid(gate)
            if ctx.swish:
                return d_y * x * s * (1 + gate * (1 - s)), d_y * gate * s, None
            return d_y * x * s * (1 - s), d_y * s, None
        return *cpu.backward(d_y, gate, x, ctx.swish), None
