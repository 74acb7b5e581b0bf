"""Closed-form start from statistics of the teacher: memory lifetimes, open gates, output projections by least squares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from linattn.distill.copying import set_decay
from linattn.distill.losses import output_errors
from linattn.distill.student import replaced
from linattn.distill.teacher import TeacherPass
from linattn.mixers import mixing_matrix
from linattn.mixers.attention.softmax import Softmax

RIDGE = 0.1  # of the mean square of a feature
OPEN = 1.2784645  # SiLU of it is 1


@dataclass
class Fit:
    """Sums for the linear map from features [N, F] to targets [N, O] of least squared error, over any number of batches."""

    squares: Tensor | None = None  # [F, F]
    products: Tensor | None = None  # [F, O]
    tokens: int = field(default=0)

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Count in a batch: [..., F] and [..., O]."""
        x, y = (t.flatten(0, -2).double() for t in (features, targets))
        squares, products = x.T @ x, x.T @ y
        self.squares = squares if self.squares is None else self.squares + squares
        self.products = products if self.products is None else self.products + products
        self.tokens += len(x)

    def weight(self) -> Tensor:
        """The map as the weight [O, F] of a linear layer."""
        assert self.squares is not None
        assert self.products is not None
        ridge = RIDGE * self.squares.diagonal().mean().clamp(min=1e-30) * torch.eye(len(self.squares)).to(self.squares)
        return torch.linalg.solve(self.squares + ridge, self.products).T


@torch.no_grad()
def calibrate(student: nn.Module, teacher: nn.Module, batches: Iterable[TeacherPass]) -> None:
    """Set gates and output projections of the student's replaced mixers; ``batches`` are read twice.

    1. Each head's decay: its lifetime is that of an exponential with the mean distance of the teacher's attention.
    2. Gates by a matrix without bias: least squares to SiLU(x) = 1 for every token.
    3. Output projections: least squares to the teacher's attention output.

    A mixer without such a part keeps what it has.
    """
    batches = list(batches)
    layers = cast(Any, student).model.layers
    for i in replaced(student):
        attention = cast(Any, teacher).model.layers[i].mixer
        set_decay(layers[i].mixer, decay_rates(attention, batches[0].inputs[i][:4]))
    _fit(student, batches, "g_proj", lambda seen, i, features: torch.full((*features.shape[:-1], 1), OPEN).to(features))
    _fit(student, batches, "o_proj", lambda seen, i, features: seen.outputs[i])


def decay_rates(attention: Softmax, x: Tensor) -> Tensor:
    """Rate [H] of the exponential decay with the mean distance of each head's attention.

    Of e^(-r d) over d >= 0 the mean distance is 1 / (e^r - 1), so r = log(1 + 1 / mean).

    Args:
        attention: a softmax layer.
        x: tokens [B, T, D] that it reads; queries in the second half count.
    """
    weights = mixing_matrix(attention, x).float()  # [B, H, T, T]
    tokens = weights.shape[-1]
    place = torch.arange(tokens, device=x.device)
    age = (place[:, None] - place).clamp(min=0)
    distance = (weights * age).sum(-1)[..., tokens // 2 :].mean((0, 2))  # [H]
    return torch.log1p(1 / distance.clamp(min=0.1))


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
    """Record what each of ``layers`` reads."""
    seen: dict[int, Tensor] = {}
    hooks = [linear.register_forward_pre_hook(lambda _, args, i=i: seen.__setitem__(i, args[0])) for i, linear in layers.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
