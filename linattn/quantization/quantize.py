"""Quantisation of a model's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from linattn.arguments import typed
from linattn.models import quantised
from linattn.models.quantised import FORMATS, Format
from linattn.ops.torch.quantised import GROUPS, Quantised
from linattn.quantization import calibration
from linattn.quantization.rounding import rounded
from linattn.quantization.sparing import formats

Progress = Callable[[str], None]


@typed
def quantize(
    model: nn.Module,
    to: str = "int4",
    group: int = 64,
    *,
    head: str = "int8",
    calibrate: Tensor | None = None,
    progress: Progress = lambda layer: None,
) -> Any:
    """Copy ``model`` with quantised weights: linear layers, embedding and head. Activations, states and all other tensors keep their dtype.

    Not quantised are the rows of linear maps for decays and write strengths, matrices with fewer than 32 rows or columns,
    norms, biases, time constants and short convolutions.

    Args:
        model: a :class:`linattn.LanguageModel` or its Hugging Face twin.
        to: ``"int8"``: a scale for each output channel; ``"int4"``: one for each ``group`` of inputs of a channel.
        group: 32, 64 or 128 inputs; for layers that it does not divide, the next smaller group that does, or int8;
            int8 too where no weight is above 2^-14 or one is above 458,528, which scales in float16 cannot express.
        head: the format of the embedding and the head, which in int4 cost as much quality as all other layers together.
        calibrate: tokens [N, T] like those that the model will read, by which later weights compensate the rounding of earlier
            ones (GPTQ). None: every weight is rounded to nearest.
        progress: called with the name of each quantised part.

    Returns:
        A new model; ``model`` is unchanged, and shares no memory with the new one.

    Raises:
        TypeError: for a model of another class.
        ValueError: for another format, a model that is quantised already, and for ``calibrate`` other than tokens [N, T].
    """
    _check(model, to, group, head)
    chosen = formats(model, to, group, head)
    new = _copied(model, chosen)
    if calibrate is not None:
        calibration.quantise(new, chosen, calibration.checked(new, calibrate), put, progress)
    for name in chosen:
        if isinstance(old := new.get_submodule(name), nn.Linear | nn.Embedding) and quantised.quantisable(old):
            put(new, name, chosen[name], rounded)
            progress(name)
    finish(new)
    return new


def put(model: nn.Module, name: str, form: Format, how: Callable[[Tensor, Format], Quantised]) -> None:
    """Quantise the layer ``name`` of ``model`` by ``how``, which receives the rows to be quantised."""
    old: Any = model.get_submodule(name)
    new: Any = quantised.empty(old, form)
    weight = old.weight.detach()
    if form.kept is not None:
        weight = torch.cat([weight[: form.kept[0]], weight[form.kept[1] :]])
    if not bool(weight.isfinite().all()):
        raise ValueError(f"model must have finite weights to be quantised, but {name} has others")
    for own, value in how(weight, form)._asdict().items():
        getattr(new, own).copy_(value)
    quantised.replace(model, name, new)


def finish(model: Any) -> None:
    """Tie the head, and record the formats in the config of a transformers model."""
    quantised.tie(model)
    if hasattr(model.config, "to_json_string"):
        model.config.quantization_config = quantised.config_of(model)
        model._tied_weights_keys = {}


def _copied(model: nn.Module, chosen: dict[str, Format]) -> nn.Module:
    """Copy ``model``, but share the weights that will be replaced."""
    shared: list[Any] = [model.get_submodule(name).weight for name in chosen]
    new = copy.deepcopy(model, {id(weight): weight for weight in shared})
    return new.eval()


def _check(model: Any, to: str, group: int, head: str) -> None:
    if not hasattr(model, "lm_head") or not hasattr(getattr(model, "model", None), "layers"):
        raise TypeError(f"model must be a linattn.LanguageModel or its Hugging Face twin, but came as {type(model).__name__}")
    for name, given in (("to", to), ("head", head)):
        if given not in FORMATS:
            raise ValueError(f"{name} must be one of {', '.join(FORMATS)}, but came as {given!r}")
    if group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(map(str, GROUPS))}, but came as {group!r}")
    if quantised.formats(model):
        raise ValueError("model must have floating weights to be quantised, but is quantised already")
