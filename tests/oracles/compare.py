"""How oracle tests measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linattn.mixers import Carry, Mixer, Recurrence
from tests.oracles import wheels

if TYPE_CHECKING:
    from linattn.hf.convert.table import Line


def distance(got: Tensor, wanted: Tensor) -> float:
    """‖got − wanted‖ / ‖wanted‖."""
    return ((got - wanted).norm() / wanted.norm()).item()


def fla(file: str) -> ModuleType:
    """One of fla-core's token by token references, for example "gla"; they compute in float32."""
    return wheels.module("fla-core==0.6.0", f"fla/ops/{file}/naive.py")


def naive_distance(mixer: Mixer, naive: Callable[[Recurrence], Tensor], x: Tensor) -> float:
    """Between a mixer and the same projections put through somebody else's recurrence ``naive``."""
    with torch.no_grad():
        return distance(mixer(x), mixer.read(naive(mixer.project(x, Carry(x))), x))


def take(mixer: Mixer, weights: Mapping[str, Tensor], lines: Iterable[Line]) -> Mixer:
    """``mixer`` with what a layer's ``weights`` are by the table that models of the kind are read by."""
    shapes, own = {name: t.shape for name, t in mixer.state_dict().items()}, {}
    for line in lines:
        own |= zip(line.ours, line.read([weights[name] for name in line.theirs], [shapes[name] for name in line.ours]), strict=True)
    mixer.load_state_dict(own)
    return mixer


def assert_graded(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], x: Tensor, weights: Iterable[Tensor] = (), tolerance: float = 1e-12
) -> None:
    """Two layers that hold the same ``weights`` give the same output for ``x``, and gradients for both along a random direction.

    Errors are relative to the norm, or to 1 where that is less: the gradient of a key's bias under softmax is nothing but rounding.
    """
    runs = []
    for layer in (ours, theirs):
        own = x.clone().requires_grad_()
        y = layer(own)
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
        runs.append([y.detach(), *torch.autograd.grad((y * direction).sum(), [own, *weights], materialize_grads=True)])
    for got, wanted in zip(*runs, strict=True):
        assert got.shape == wanted.shape
        assert (got - wanted).norm() < tolerance * max(1.0, wanted.norm().item())
