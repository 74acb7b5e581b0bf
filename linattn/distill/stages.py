"""The three stages: trained parameters, tokens, learning rate and loss of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from linattn.distill import losses
from linattn.distill.options import ConvertOptions
from linattn.distill.student import replaced
from linattn.distill.teacher import teacher_pass

TITLES = {1: "mixer outputs", 2: "KL of the logits", 3: "cross-entropy"}
WARM_UP = 20  # steps over which the learning rate of a long stage rises
_WIDTH1, _RATE1 = 4096, 1e-3  # learning rate of the first stage at that width
_WIDTH2, _RATE2 = 576, 6e-4  # learning rate of the second stage at that width


@dataclass(frozen=True)
class Stage:
    """One stage of a distillation.

    Args:
        number: 1, 2 or 3.
        steps: optimizer steps; 0 skips the stage.
        context: tokens T of a sequence.
        rows: sequences B of a step.
        rate: learning rate at the start.
        final: learning rate at the end of a cosine.
    """

    number: int
    steps: int
    context: int
    rows: int
    rate: float
    final: float

    @property
    def tokens(self) -> int:
        """Tokens of the whole stage."""
        return self.steps * self.rows * self.context

    def rate_at(self, step: int) -> float:
        """Learning rate of ``step``, counted from 0: a linear rise over the first tenth, at most 20 steps, times the cosine."""
        risen = min(1.0, (step + 1) / (min(WARM_UP, self.steps // 10) + 1))
        return risen * (self.final + (self.rate - self.final) * (1 + math.cos(math.pi * step / self.steps)) / 2)


def stages_of(options: ConvertOptions, width: int) -> list[Stage]:
    """Plan the three stages for a model of ``width`` D; skipped ones have no steps."""
    rate1 = _RATE1 * math.sqrt(_WIDTH1 / width) if options.rate1 is None else options.rate1
    rate2 = _RATE2 * _WIDTH2 / width if options.rate2 is None else options.rate2
    context3 = 4 * options.context if options.context3 is None else options.context3
    rows3 = max(1, options.batch_size * options.context // context3)
    planned = (
        (options.tokens1, options.context, options.batch_size, rate1, rate1 / 100),
        (options.tokens2, options.context, options.batch_size, rate2, rate2 / 10),
        (options.tokens3, context3, rows3, rate2 / 10, rate2 / 10),
    )
    return [
        Stage(number, -(-tokens // (rows * context)), context, rows, rate, final)
        for number, (tokens, context, rows, rate, final) in enumerate(planned, 1)
    ]


def trained(student: nn.Module, stage: Stage) -> list[nn.Parameter]:
    """List the parameters that ``stage`` trains, and make only these require gradients: replaced mixers in the first, then all."""
    student.requires_grad_(stage.number > 1)
    if stage.number == 1:
        for i in replaced(student):
            cast(Any, student).model.layers[i].mixer.requires_grad_(True)
    return [p for p in student.parameters() if p.requires_grad]


def loss_of(stage: Stage, student: nn.Module, teacher: nn.Module, ids: Tensor) -> Tensor:
    """Compute the mean loss of the tokens ``ids`` [B, T]: normalised squared error of mixers, or nats per token."""
    backbone = cast(Any, student).model
    if stage.number == 1:
        return losses.output_errors(student, teacher_pass(teacher, ids)).mean()
    if stage.number == 3:
        return losses.cross_entropy(student, backbone(ids)[0], ids) / ids[:, 1:].numel()
    with torch.no_grad():
        target = cast(Any, teacher).model(ids)[0]
    return losses.distances(student, teacher, backbone(ids)[0], target) / ids.numel()
