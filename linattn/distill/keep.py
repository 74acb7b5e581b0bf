"""Choice of the layers that stay softmax: restore one, measure the KL, rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from torch import nn

from linattn.distill.student import Layer, config_with, new_student, replaced
from linattn.hf import LinattnForCausalLM


def rank_layers(student: nn.Module, softmax: nn.Module, measure: Callable[[], float]) -> dict[int, float]:
    """Rank the replaced layers by ``measure`` with only that layer restored to softmax, best layer first.

    Args:
        student: a model with layers other than softmax; unchanged afterwards.
        softmax: a model of the same stack whose layers are all softmax.
        measure: a figure of the student, such as the KL from the teacher; lower is better. Ties are ranked by layer number.
    """
    found: dict[int, float] = {}
    for i in replaced(student):
        layer, own = cast(Any, student).model.layers[i], cast(Any, student).model.layers[i].mixer
        layer.mixer = cast(Any, softmax).model.layers[i].mixer
        try:
            found[i] = measure()
        finally:
            layer.mixer = own
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def restored(
    student: LinattnForCausalLM, softmax: LinattnForCausalLM, layers: Sequence[Layer], full: Sequence[Layer], kept: Collection[int]
) -> tuple[LinattnForCausalLM, list[Layer]]:
    """Build a new model from ``student`` with the layers ``kept`` of ``softmax``.

    Args:
        student, softmax: models of the same stack.
        layers, full: their layers.
        kept: numbers of the layers taken from ``softmax``.
    """
    mixed = [full[i] if i in kept else layer for i, layer in enumerate(layers)]
    like = student.model.embedding.weight
    new = new_student(config_with(softmax.config, mixed), like)
    places = tuple(f"model.layers.{i}.mixer." for i in kept)
    weights = {name: t for name, t in student.state_dict().items() if not name.startswith(places)}
    new.load_state_dict(weights | {name: t for name, t in softmax.state_dict().items() if name.startswith(places)})
    return new, mixed
