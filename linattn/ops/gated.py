"""Gates: the gate of SwiGLU, and a sigmoid.

On a CPU in eager mode they are one forward and one backward kernel, which saves only the two inputs; elsewhere they are
operations of torch, which compilers and the captured decoding step fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import dispatch
from linattn.ops.operator import Operator, Pass

_CPU = torch.device("cpu")


def gated(gate: Tensor, x: Tensor, *, swish: bool = True) -> Tensor:
    """Compute ``silu(gate) ⊙ x``, or ``sigmoid(gate) ⊙ x`` without ``swish``, for equal shapes [...]; kernels round the result once."""
    # Equal with and without gradients, because checkpointing must reproduce the forward pass.
    if dispatch.choose("auto", _refusal, gate, x) == "cpu":
        return cast(Tensor, KERNELS(gate, x, swish))
    return portable(gate, x, swish)


def portable(gate: Tensor, x: Tensor, swish: bool = True) -> Tensor:
    """Compute the definition in operations of torch."""
    return (F.silu(gate) if swish else torch.sigmoid(gate)) * x


def _refusal(name: str, _: bool, gate: Tensor, x: Tensor) -> str | None:
    if name == "torch":
        return None
    if name == "reference":
        return "the definition is written in PyTorch operations"
    if name == "triton":
        return "it has no kernel: compilers and captured steps fuse PyTorch operations"
    if x.device != _CPU:
        return "it runs on the CPU only"
    return "a compiler fuses the gate with adjacent operations" if torch.compiler.is_compiling() else KERNELS.refusal(gate, x)


def _load() -> ModuleType:
    from linattn.ops.cpu import gated as cpu

    return cpu


def _derivative(d_y: Tensor, tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Tensor, Tensor]:
    (gate, x), (swish,) = tensors, options
    s = torch.sigmoid(gate)
    if swish:
        return d_y * x * s * (1 + gate * (1 - s)), d_y * gate * s
    return d_y * x * s * (1 - s), d_y * s


KERNELS = Operator(
    _load,
    Pass("(Tensor gate, Tensor x, bool swish) -> Tensor"),
    Pass("(Tensor d_y, Tensor gate, Tensor x, bool swish) -> (Tensor, Tensor)"),
    "y", "gate x", "x", derivative=_derivative,
)  # fmt: skip


def _explained(gate: Tensor, x: Tensor, **_: Any) -> dispatch.Explained:
    return dispatch.Explained(f"gated on {x.device}, {x.dtype}, {list(x.shape)}", x.device, _refusal, (gate, x))


dispatch.explains(gated, _explained)
