"""Closed-form initialisation from the teacher's activations: output gates and projections by least squares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from linattn.distill.losses import output_errors
from linattn.distill.student import replaced
from linattn.distill.teacher import TeacherPass

RIDGE = 0.1  # ridge penalty relative to the mean square of a feature: small weights are a better start for the next stages
OPEN = 1.2784645  # SiLU(OPEN) = 1


@dataclass
class Fit:
    """Least-squares fit of a linear map from features [N, F] to targets [N, O], accumulated over batches."""

    ridge: float = RIDGE
    squares: Tensor | None = None  # [F, F]
    products: Tensor | None = None  # [F, O]

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Accumulate a batch: [..., F] and [..., O]."""
        x, y = (t.flatten(0, -2).double() for t in (features, targets))
        squares, products = x.T @ x, x.T @ y
        self.squares = squares if self.squares is None else self.squares + squares
        self.products = products if self.products is None else self.products + products

    def weight(self) -> Tensor:
        """Solve for the map, as the weight [O, F] of a linear layer."""
        assert self.squares is not None
        assert self.products is not None
        ridge = self.ridge * self.squares.diagonal().mean().clamp(min=1e-30) * torch.eye(len(self.squares)).to(self.squares)
        return torch.linalg.solve(self.squares + ridge, self.products).T


@torch.no_grad()
def calibrate(student: nn.Module, batches: Iterable[TeacherPass]) -> None:
    """Set gates and output projections of the student's replaced mixers; ``batches`` are read twice.

    1. Output gates, the last linear map of ``g_proj``: least squares to SiLU(x) = 1 for every token.
    2. Output projections, ``o_proj``: least squares to the teacher's attention output.

    Mixers without such layers keep their weights.
    """
    batches = list(batches)
    _fit(student, batches, "g_proj", lambda seen, i, features: torch.full((*features.shape[:-1], 1), OPEN).to(features))
    _fit(student, batches, "o_proj", lambda seen, i, features: seen.outputs[i])


def _fit(student: nn.Module, batches: list[TeacherPass], name: str, target: Any) -> None:
    """Fit the last linear layer called ``name`` of every replaced mixer to ``target(pass, layer, features)``."""
    last: dict[int, nn.Linear] = {}
    for i in replaced(student):
        found = getattr(cast(Any, student).model.layers[i].mixer, name, None)
        linear = found[-1] if isinstance(found, nn.Sequential) else found
        if isinstance(linear, nn.Linear):
            last[i] = linear
    fits = {i: Fit() for i in last}
    for seen in batches:
        with _features(last) as features:
            output_errors(student, seen)
        for i, fit in fits.items():
            fit.add(features[i], target(seen, i, features[i]))
    for i, linear in last.items():
        linear.weight.copy_(fits[i].weight().expand_as(linear.weight))
        if linear.bias is not None:
            linear.bias.zero_()


@contextmanager
def _features(layers: dict[int, nn.Linear]) -> Iterator[dict[int, Tensor]]:
    """Context that records the inputs of ``layers``."""
    seen: dict[int, Tensor] = {}
    hooks = [linear.register_forward_pre_hook(lambda _, args, i=i: seen.__setitem__(i, args[0])) for i, linear in layers.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
