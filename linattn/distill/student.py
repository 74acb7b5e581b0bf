"""Construction of the student: the teacher's stack with another mixer in every layer that does not stay softmax."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn

from linattn import mixers, models
from linattn.arguments import described
from linattn.distill.copying import copy_mixer
from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.mixers.attention.softmax import Softmax
from linattn.models import pattern

SOFTMAX = "softmax"
Layer = tuple[str, dict[str, Any]]  # a mixer's name and all options of its constructor but dim


def check_teacher(model: Any) -> None:
    """Check that the teacher is a language model with softmax attention in every layer.

    Raises:
        TypeError, ValueError: if it is not.
    """
    if not isinstance(model, models.LanguageModel | LinattnForCausalLM):
        raise TypeError(f"teacher must be a folder, a linattn.LanguageModel or its Hugging Face twin, but came as {described(model)}")
    names = model.config.mixer_names
    if SOFTMAX not in names:
        raise ValueError(f"teacher must have softmax attention in every layer, but is made of {', '.join(dict.fromkeys(names))}")
    if others := [f"layer {i} is {name}" for i, name in enumerate(names) if name != SOFTMAX]:
        raise ValueError(f"teacher must have softmax attention in every layer, but {others[0]}")


def layers_of(config: models.LMConfig) -> list[Layer]:
    """List each layer's mixer with its options from the config."""
    return [(name, config.options_of(i)) for i, name in enumerate(config.mixer_names)]


def student_layers(
    teacher: nn.Module, mixer: str, *, kept: Collection[int] | None = None, rotary: str = "keep", mixer_options: dict[str, Any]
) -> list[Layer]:
    """Layers of a student of ``teacher``.

    Args:
        teacher: a model of softmax layers.
        mixer: pattern of mixer names; its softmax layers are the teacher's.
        kept: layers that stay softmax; then ``mixer`` names none. None: those of the pattern.
        rotary: ``"drop"`` leaves the softmax layers without rotary positions.
        mixer_options: options by mixer name, which override those derived from the teacher.

    Raises:
        ValueError: for invalid patterns and layers.
    """
    config = cast(models.LMConfig, teacher.config)
    named = pattern.parse(mixer, "mixer")
    if kept is not None and SOFTMAX in named:
        raise ValueError("mixer must not name softmax where keep or keep_layers chooses the softmax layers")
    names = pattern.fill(named, config.layers)
    names = names if kept is None else _with_softmax(names, kept)
    if unknown := sorted(set(mixer_options) - set(names)):
        raise ValueError(f"mixer_options names {unknown[0]!r}, but the mixers are {', '.join(dict.fromkeys(names))}")
    dropped = {"rotated": 0} if rotary == "drop" else {}
    layers: list[Layer] = []
    for i, name in enumerate(names):
        if name == SOFTMAX:
            layers.append((name, config.options_of(i) | dropped | mixer_options.get(name, {})))
        else:
            attention = cast(Softmax, cast(Any, teacher).model.layers[i].mixer)
            placed = mixers.info(name).cls.placed(names[:i].count(name), names.count(name))
            layers.append((name, placed | derived_options(name, attention) | mixer_options.get(name, {})))
    return layers


def _with_softmax(names: list[str], kept: Collection[int]) -> list[str]:
    if outside := sorted(i for i in kept if not 0 <= i < len(names)):
        raise ValueError(f"keep_layers must be from 0 to {len(names) - 1}, but has {outside[0]}")
    return [SOFTMAX if i in kept else name for i, name in enumerate(names)]


def derived_options(name: str, attention: Softmax) -> dict[str, Any]:
    """Options of the mixer ``name`` that give its projections the shapes of ``attention``, as far as it has such options."""
    heads, size, dim = attention.heads, attention.size, cast(int, attention.dim)
    ratio = heads * size / dim
    known: dict[str, Any] = {"heads": heads, "value_heads": heads, "value_ratio": ratio, "key_ratio": ratio}
    known |= dict.fromkeys(("head_dim", "head_size", "size", "key_size", "value_size"), size)
    known |= {"value_residual": False, "affine": True, "interleaved": False}  # RWKV-7 and RetNet: match the teacher's values and positions
    if name == "mamba2":
        known |= {"expand": 1, "state_size": size, "groups": heads}
    return {option: known[option] for option in mixers.info(name).options if option in known}


def config_with(config: models.LMConfig, layers: Sequence[Layer]) -> LMConfig:
    """Config of the student: the teacher's with ``layers`` replaced and embeddings untied."""
    names = [name for name, _ in layers]
    shared = dict(layers)
    alike = all(options == shared[name] for name, options in layers)
    given: dict[str, Any] = {f.name: getattr(config, f.name) for f in fields(models.LMConfig)}
    given |= {"mixer": written(names), "tie_embeddings": False}
    given |= {"mixer_options": shared if alike else {}, "layer_options": None if alike else [options for _, options in layers]}
    if (scales := config.residual_scales.get(SOFTMAX)) is not None:
        given["residual_scales"] = config.residual_scales | dict.fromkeys(names, scales)
        if SOFTMAX not in names:
            del given["residual_scales"][SOFTMAX]
    given |= {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return LMConfig(**given)


def written(names: list[str]) -> str:
    """Shortest pattern that expands to ``names``: a, a, b, a, a, b -> "a*2, b"."""
    period = next(p for p in range(1, len(names) + 1) if pattern.fill(names[:p], len(names)) == names)
    entries: list[tuple[str, int]] = []
    for name in names[:period]:
        if entries and entries[-1][0] == name:
            entries[-1] = (name, entries[-1][1] + 1)
        else:
            entries.append((name, 1))
    return ", ".join(name if count == 1 else f"{name}*{count}" for name, count in entries)


def new_student(config: LMConfig, like: Tensor) -> LinattnForCausalLM:
    """Create a model in evaluation mode with the device and dtype of ``like``."""
    return nn.Module.to(LinattnForCausalLM(config), device=like.device, dtype=like.dtype).eval()


@torch.no_grad()
def student_of(teacher: nn.Module, layers: Sequence[Layer], *, context: int = 512) -> LinattnForCausalLM:
    """Create a student with the teacher's weights where they match, in the teacher's dtype and on its device.

    Embedding, head, norms, feed-forwards and softmax layers are copied. Projections of other mixers are copied if their sizes are
    equal, and gates are set by :func:`linattn.distill.copying.copy_mixer`; other weights are drawn from torch's generator.

    Args:
        teacher: a model of softmax layers.
        layers: the student's, see :func:`student_layers`.
        context: longest initial lifetime of a head's memory, in tokens.
    """
    config = cast(models.LMConfig, teacher.config)
    weights, like = teacher.state_dict(), cast(Any, teacher).model.embedding.weight
    student = new_student(config_with(config, layers), like)
    new = [i for i, (name, _) in enumerate(layers) if name != SOFTMAX]
    places = tuple(f"model.layers.{i}.mixer." for i in new)
    copied = {name: t for name, t in weights.items() if not name.startswith(places)}
    unexpected = student.load_state_dict(copied, strict=False).unexpected_keys
    assert not unexpected, unexpected
    for i in new:
        copy_mixer(cast(Any, teacher).model.layers[i].mixer, cast(Any, student).model.layers[i].mixer, context=context)
    return student


def replaced(student: nn.Module) -> list[int]:
    """Layers of ``student`` that are not softmax."""
    return [i for i, name in enumerate(cast(models.LMConfig, student.config).mixer_names) if name != SOFTMAX]
