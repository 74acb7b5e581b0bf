"""One run of the teacher with what goes into and comes out of every attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TeacherPass:
    """What a run of the teacher on tokens [B, T] leaves.

    Args:
        inputs: for every layer the tokens [B, T, D] that its mixer reads.
        outputs: for every layer what its mixer makes of them, [B, T, D].
        hidden: hidden states [B, T, D] that its head reads.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    hidden: Tensor


@torch.no_grad()
def teacher_pass(teacher: nn.Module, ids: Tensor) -> TeacherPass:
    """Run ``teacher`` once on ``ids`` [B, T] and record all of its layers at once."""
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
