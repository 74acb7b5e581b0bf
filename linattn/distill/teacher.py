"""Run of the teacher that records the input and output of every attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TeacherPass:
    """Activations of a run of the teacher on tokens [B, T].

    Args:
        inputs: input [B, T, D] of each layer's mixer.
        outputs: output [B, T, D] of each layer's mixer.
        hidden: input [B, T, D] of the head.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    hidden: Tensor


@torch.no_grad()
def teacher_pass(teacher: nn.Module, ids: Tensor) -> TeacherPass:
    """Run ``teacher`` once on ``ids`` [B, T] and record all of its layers."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def record(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        inputs.append(args[0])
        outputs.append(output)

    backbone = cast(Any, teacher).model
    hooks = [layer.mixer.register_forward_hook(record) for layer in backbone.layers]
    try:
        hidden, _ = backbone(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return TeacherPass(inputs, outputs, hidden)
