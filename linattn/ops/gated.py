"""Gates: the gate of SwiGLU, and a sigmoid.

In eager mode, on a CPU and on a GPU, they are one forward and one backward kernel, which saves only the two inputs; elsewhere they are
operations of torch, which compilers and the captured decoding step fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from linattn.ops import dispatch
from linattn.ops.operator import Operator, Pass
from linattn.ops.torch.gated import gated as portable


def gated(gate: Tensor, x: Tensor, *, swish: bool = True) -> Tensor:
    """Compute ``silu(gate) ⊙ x``, or ``sigmoid(gate) ⊙ x`` without ``swish``, for equal shapes [...]; kernels round the result once."""
    # Equal with and without gradients, because checkpointing must reproduce the forward pass.
    name = dispatch.choose("auto", _refusal, gate, x)
    return portable(gate, x, swish) if name == "torch" else cast(Tensor, KERNELS[name](gate, x, swish))


def _refusal(name: str, asked: bool, gate: Tensor, x: Tensor) -> str | None:
    if name in KERNELS and torch.compiler.is_compiling():
        return "a compiler fuses the gate with adjacent operations"
    return dispatch.refusal(name, asked, x, KERNELS.__getitem__, (gate, x))


def _load(name: str) -> ModuleType:
    if name == "cpu":
        from linattn.ops.cpu import gated as cpu

        return cpu
    from linattn.ops.triton import gated as gpu

    return gpu


def _derivative(d_y: Tensor, tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, Tensor]:
    (gate, x), (swish,) = tensors, options
    s = torch.sigmoid(gate)
    if swish:
        return d_y * x * s * (1 + gate * (1 - s)), d_y * gate * s
    return d_y * x * s * (1 - s), d_y * s


def _operator(name: str) -> Operator:
    return Operator(
        partial(_load, name),
        Pass("(Tensor gate, Tensor x, bool swish) -> Tensor"),
        Pass("(Tensor d_y, Tensor gate, Tensor x, bool swish) -> (Tensor, Tensor)"),
        "y", "gate x", "x", derivative=_derivative,
    )  # fmt: skip


KERNELS = {name: _operator(name) for name in ("triton", "cpu")}


def _explained(gate: Tensor, x: Tensor, **_: Any) -> dispatch.Explained:
    return dispatch.Explained(f"gated on {x.device}, {x.dtype}, {list(x.shape)}", x.device, _refusal, (gate, x))


dispatch.explains(gated, _explained)
