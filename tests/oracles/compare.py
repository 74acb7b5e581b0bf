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
