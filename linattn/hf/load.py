"""Conversion of published models to ours and back: :func:`load` and :func:`export`, over the tables in :mod:`linattn.hf.convert`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig

from linattn import models
from linattn.arguments import known_device, typed
from linattn.hf import folder as folders
from linattn.hf import gguf
from linattn.hf import remedy as remedies
from linattn.hf.config import LMConfig
from linattn.hf.convert import Family, family
from linattn.hf.convert.table import Line, same
from linattn.hf.folder import listed
from linattn.hf.model import LinattnForCausalLM
from linattn.models import quantised
from linattn.models.memory import FLOAT, language_parameters, require


def load(
    path_or_config: str | os.PathLike[str] | PreTrainedConfig | models.LMConfig | dict[str, Any],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    variant: str | None = None,
) -> LinattnForCausalLM:
    """Load a published model as a model of this library, with the same logits.

    ``linattn.load("mamba-130m-hf")`` reads a folder with ``config.json`` and safetensors files, of transformers' models or of
    flash-linear-attention's (the names are in ``linattn.hf.convert.FAMILIES``), or a saved model of this library;
    ``linattn.load("model.gguf")`` reads a file of llama.cpp (``linattn.hf.gguf``). A configuration in place of a folder creates a new
    model with random weights. ``generate`` follows the folder's ``generation_config.json`` for sampling and
    end tokens.

    Args:
        path_or_config: the folder or GGUF file, a config of transformers or of linattn, or the content of a ``config.json``.
        dtype: dtype of the weights; None keeps that of the folder (float32 for a new model and for quantised weights). Time constants
            stay in float32 at least.
        device: device of the model.
        variant: variant of the folder's weights, in ``model.VARIANT.safetensors``, as in transformers; only for folders.

    Returns:
        The model in evaluation mode.

    Raises:
        OSError: if there is no such folder or it lacks a file.
        ImportError: for a GGUF file if the ``gguf`` package is not installed.
        ValueError: for an unknown family or option, for weights that are missing, unexpected or of another shape, for
            damaged files, pickles and links out of the folder. Names and shapes are checked before any weight is read.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating torch.dtype, but came as {dtype!r}")
    device = known_device("device", "cpu" if device is None else device)
    if isinstance(path_or_config, str | os.PathLike):
        model = _read(Path(path_or_config), variant, dtype)
    elif variant is not None:
        raise ValueError(f"variant must be None with a config, but came as {variant!r}")
    else:
        config = config_of(path_or_config)
        parameters = language_parameters(config)
        require(FLOAT * parameters, f"{parameters:,} parameters (dim {config.dim:,}, layers {config.layers:,})")
        model = _moved(LinattnForCausalLM(config), dtype)
    return _moved(model, device).eval()


@typed
def export(model: nn.Module, model_type: str, path: str | os.PathLike[str], *, tokenizer: str | os.PathLike[str] | None = None) -> None:
    """Write ``model`` as a folder that the published class loads with the same logits.

    Args:
        model: a :class:`linattn.LanguageModel` or a :class:`LinattnForCausalLM`.
        model_type: one of ``linattn.hf.convert.FAMILIES``.
        path: the folder; it must not exist, and is written atomically.
        tokenizer: a folder whose tokenizer is copied, file by file, such as the one that ``model`` was loaded from.

    Raises:
        ValueError: if there is no such family, or with the reason if the family cannot express the model.
        TypeError: if ``model`` is of another class.
        OSError: if the folder exists or cannot be written.
    """
    target = family(model_type)
    if not isinstance(model, models.LanguageModel | LinattnForCausalLM):
        raise TypeError(f"model must be a linattn.LanguageModel or a LinattnForCausalLM, but came as {type(model).__name__}")
    ours, weights = model.config, quantised.floats(model)
    content = their_config(ours, target)
    content["dtype"] = str(weights["model.embedding.weight"].dtype).removeprefix("torch.")
    contents = {folders.CONFIG: content}
    if isinstance(model, LinattnForCausalLM) and model.generation_config is not None:
        contents[folders.GENERATION] = json.loads(model.generation_config.to_json_string())
    copied = {} if tokenizer is None else folders.tokenizer_of(Path(tokenizer))
    theirs: dict[str, Tensor] = {}
    for line in target.lines(ours):
        theirs |= zip(line.theirs, line.write([weights[name] for name in line.ours]), strict=True)
    folders.write(Path(path), contents, theirs, copied)


def config_of(given: PreTrainedConfig | models.LMConfig | dict[str, Any]) -> LMConfig:
    """Convert ``given`` to our config: a config of this library, of transformers, or the content of a ``config.json``."""
    if isinstance(given, LMConfig):
        return given
    if isinstance(given, models.LMConfig):
        return LMConfig(**{f.name: getattr(given, f.name) for f in fields(given)})
    content = given if isinstance(given, dict) else given.to_dict() if isinstance(given, PreTrainedConfig) else None
    if content is None:
        raise TypeError(f"path_or_config must be a path or a config, but came as {type(given).__name__}")
    if not isinstance(kind := content.get("model_type"), str):
        raise ValueError("the config has no model_type, so its family is unknown")
    try:
        if kind == LMConfig.model_type:
            return LMConfig.from_dict(content)
        source = family(kind)
        return LMConfig(**source.fields(source.config_of(content)))
    except (StrictDataclassError, TypeError, LookupError, ArithmeticError, AttributeError) as error:  # a config may hold any JSON
        raise ValueError(f"the config is invalid: {error}") from None


def their_config(ours: models.LMConfig, target: Family) -> dict[str, Any]:
    """Content of a ``config.json`` of ``target`` equivalent to ``ours``; ValueError if there is none."""
    try:
        content = {"model_type": target.model_type, **target.config(ours)}
        complete = target.config_of(content)
        again = models.LMConfig(**{k: v for k, v in target.fields(complete).items() if k in _FIELDS})
        differences = list(_differences(_on_meta(ours), _on_meta(again)))
    except (ValueError, LookupError, StrictDataclassError) as error:
        reason = f"it has layers of {', '.join(dict.fromkeys(ours.mixer_names))}" if isinstance(error, StrictDataclassError) else str(error)
        advice = f"for --to {target.model_type} train with {remedies.layers_for(target)}"
        raise ValueError(f"{target.model_type} cannot express this model: {reason}; {advice}") from None
    if differences:
        words = remedies.remedy(ours, again)
        advice = f"; for --to {target.model_type} train with {words}" if words else ""
        raise ValueError(f"{target.model_type} cannot express this model: {remedies.distinct(differences)}{advice}")
    full = json.loads(complete.to_json_string(use_diff=False)) if isinstance(complete, PreTrainedConfig) else content
    return full | {"architectures": [target.architecture]}


_FIELDS = {f.name for f in fields(models.LMConfig)}
_NAMES = 64  # limit of names in an error; a layer without experts has fewer weights
_LAYERS = ("num_hidden_layers", "num_blocks", "layers")


def _read(path: Path, variant: str | None, dtype: torch.dtype | None) -> LinattnForCausalLM:
    with _opened(path, variant) as (content, generation, weights):
        try:
            for part, name in product((content, content.get("text_config")), _depths(content)):  # before memory is allocated
                if isinstance(part, dict) and isinstance(count := part.get(name), int) and count > len(weights.names):
                    raise ValueError(f"{folders.CONFIG} says {name} = {count}, but there are {len(weights.names)} weights")
            config = config_of(content)
            model = _empty(config)
            if (quantization := content.get("quantization_config")) is not None:
                if content["model_type"] != LMConfig.model_type:
                    raise ValueError(f"quantization_config is read for {LMConfig.model_type} models alone")
                quantised.prepare(model, quantization)
                model._tied_weights_keys = {}
            state = _state(model, content["model_type"], weights)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    model.load_state_dict(state, assign=True)
    if quantised.formats(model):
        quantised.tie(model)
    elif config.tie_embeddings:
        model.lm_head.weight = model.model.embedding.weight
    if generation is not None:
        model.generation_config = generation
    return _moved(model, dtype or _dtype(content, state))  # some weights have a wider dtype than the embedding


def _dtype(content: dict[str, Any], state: dict[str, Tensor]) -> torch.dtype:
    """Dtype of the embedding, or the one that the config names for a model whose embedding is quantised."""
    if "model.embedding.weight" in state:
        return state["model.embedding.weight"].dtype
    named = getattr(torch, str(content.get("dtype")), None)
    return named if isinstance(named, torch.dtype) and named.is_floating_point else torch.float32


@contextmanager
def _opened(path: Path, variant: str | None) -> Iterator[tuple[dict[str, Any], GenerationConfig | None, folders.Weights]]:
    """Config, generation settings and weights of a folder or of a GGUF file."""
    if path.suffix != gguf.SUFFIX or path.is_dir():
        content, generation = folders.config_of(path), _generation(path)
        with folders.weights_of(path, variant) as weights:
            yield content, generation, weights
        return
    if variant is not None:
        raise ValueError(f"variant must be None for a GGUF file, but came as {variant!r}")
    file = gguf.GGUFFile(path)
    try:
        content, weights = gguf.config_of(file), gguf.weights_of(file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    yield content, None, weights


def _depths(content: dict[str, Any]) -> tuple[str, ...]:
    """Keys of a ``config.json`` that count layers. xLSTM's class also saves the default of a key that it does not use."""
    return ("num_blocks",) if content.get("model_type") == "xlstm" and content.get("num_blocks") is not None else _LAYERS


def _generation(path: Path) -> GenerationConfig | None:
    """Read a folder's generation settings; None if it has none besides its config."""
    content = folders.generation_of(path)
    try:
        return None if content is None else GenerationConfig.from_dict(content)
    except (ValueError, TypeError, AttributeError) as error:  # the file may hold any JSON
        raise ValueError(f"{path}: {folders.GENERATION} is invalid: {error}") from None


def _empty(config: LMConfig) -> LinattnForCausalLM:
    """Build the model of ``config`` on the meta device; raise ValueError for sizes that no tensor can have."""
    try:
        with torch.device("meta"):
            return LinattnForCausalLM(config)
    except RuntimeError as error:
        raise ValueError(f"{folders.CONFIG} asks for tensors that cannot exist: {error}") from None


def _moved(model: LinattnForCausalLM, target: torch.device | str | torch.dtype | None) -> LinattnForCausalLM:
    """``model.to(target)``; None changes nothing."""
    return model if target is None else nn.Module.to(model, target)


def _state(model: LinattnForCausalLM, model_type: str, weights: folders.Weights) -> dict[str, Tensor]:
    """Make the ``state_dict`` of ``model``, which is on the meta device, from checked ``weights``."""
    hollow, tied = model.state_dict(), model.config.tie_embeddings
    if model_type == LMConfig.model_type:
        embedding, head = "model.embedding.weight", "lm_head.weight"
        lines = [same(name, name) for name in hollow if not (tied and name == head)]
        tied = tied and head in hollow
    else:
        experts = model.config.ffn_options.get("experts", {}).get("count", 0)  # their config may count experts although no layer has any
        merged = [count for name in weights.names if name.endswith(".experts.down_proj") for count in weights.shape(name)[:1]]
        if experts > max(len(weights.names), *merged, 0):  # before names are built for them
            raise ValueError(f"{folders.CONFIG} counts {experts} experts in a layer, but there are {len(weights.names)} weights")
        source = family(model_type)
        (embedding, head), lines = source.tied, source.lines(model.config)
        whole = embedding.split(".")[0] + "."
        if embedding not in weights.names and embedding.removeprefix(whole) in weights.names:  # saved by the class without a head
            weights.rename({r"^": whole})
        weights.rename(source.aliases, source.ignored)
        lines = [line.merged if line.merged and weights.names.issuperset(line.merged.theirs) else line for line in lines]
    _check(weights, lines, hollow, {head} if tied else set())
    state: dict[str, Tensor] = {}
    for line in lines:
        if line.ours:
            own = line.read([weights[name] for name in line.theirs], [hollow[name].shape for name in line.ours])
            state |= zip(line.ours, own if len(own) == 1 else [t.clone() for t in own], strict=True)  # copies parts of one tensor
    if tied:
        state["lm_head.weight"] = state["model.embedding.weight"]
        if head in weights.names and not torch.equal(weights[head], weights[embedding]):
            raise ValueError(f"the config ties {head} to {embedding}, but their weights are different")
    return state


def _check(weights: folders.Weights, lines: list[Line], hollow: dict[str, Tensor], spare: set[str]) -> None:
    """Raise ValueError unless the weights are exactly those of ``lines``, before any is read; ``spare`` ones are optional."""
    missing, wrong, known = [], [], set(spare)
    for line in lines:
        known |= set(line.theirs)
        if line.optional:
            continue
        for name, t in zip(line.theirs, line.write([hollow[ours] for ours in line.ours]), strict=True):
            if name not in weights.names:
                missing.append(name)
            elif weights.shape(name) != tuple(t.shape):
                wrong.append(f"{name} {list(weights.shape(name))} where {list(t.shape)} was wanted")
    found = {"missing": missing, "not expected": sorted(weights.names - known), "of another shape": wrong}
    if any(found.values()):
        raise ValueError(
            "the weights do not fit the config. " + ". ".join(f"{k[0].upper()}{k[1:]}: {listed(v, _NAMES)}" for k, v in found.items() if v)
        )


def _on_meta(config: models.LMConfig) -> models.LanguageModel:
    with torch.device("meta"):
        return models.LanguageModel(config)


def _differences(ours: nn.Module, again: nn.Module) -> Iterator[str]:
    """Differences in structure between two models: modules, sizes, and settings of modules."""
    theirs = dict(again.named_modules())
    for name, module in ours.named_modules():
        other = theirs.pop(name, None)
        if type(other) is not type(module):
            yield f"{name or 'it'} is {type(module).__name__}, but would be {type(other).__name__ if other is not None else 'nothing'}"
            continue
        was, would_be = _settings(module), _settings(other)
        yield from (
            f"{f'{name}.' if name else ''}{key} is {was.get(key)!r}, but would be {would_be.get(key)!r}"
            for key in sorted(was.keys() | would_be.keys())
            if was.get(key) != would_be.get(key)
        )
    yield from (f"{name} is nothing, but would be {type(other).__name__}" for name, other in theirs.items())


def _settings(module: nn.Module) -> dict[str, Any]:
    """Numbers, strings, options and shapes of a module."""
    kinds = (int, float, str, tuple, list, dict)
    own = {key: list(v) if isinstance(v, tuple) else v for key, v in vars(module).items() if isinstance(v, kinds) and key[0] != "_"}
    return own | {name: list(t.shape) for name, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
