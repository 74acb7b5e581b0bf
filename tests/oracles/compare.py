"""How oracle tests measure."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from linattn.mixers import Carry, Mixer, Recurrence
from tests.oracles import wheels


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
