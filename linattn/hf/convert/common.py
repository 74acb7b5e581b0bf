"""Conversions shared by the configs of all families."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from linattn.hf.convert.table import Line, named, part, same, stack
from linattn.models import LMConfig

ANGLES = r"\.rotary_emb\.inv_freq$"  # frequencies of rotary positions in old checkpoints, which follow from the config
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def base(theirs: Any) -> dict[str, Any]:
    """Convert sizes, the tie of embedding and head, and special tokens to our fields."""
    known = {name: getattr(theirs, name) for name in TOKENS if getattr(theirs, name, None) is not None}
    return {
        "vocab_size": theirs.vocab_size,
        "dim": theirs.hidden_size,
        "layers": theirs.num_hidden_layers,
        "tie_embeddings": bool(theirs.tie_word_embeddings),
        **known,
    }


def back(ours: LMConfig) -> dict[str, Any]:
    """Convert these linattn fields to those of transformers; special tokens that the config lacks become None."""
    sizes = {"vocab_size": ours.vocab_size, "hidden_size": ours.dim, "num_hidden_layers": ours.layers}
    return sizes | {"tie_word_embeddings": ours.tie_embeddings} | {name: getattr(ours, name, None) for name in TOKENS}


def blocks(ours: LMConfig) -> int:
    """Number of blocks of RWKV-4 and RWKV-7, each two of our layers. The published classes divide by this number minus 1."""
    if ours.layers < 4:
        raise ValueError("it has one block, but the published class needs at least two")
    return ours.layers // 2


def transformers_config(model_type: str) -> Callable[[dict[str, Any]], Any]:
    """Config class of transformers' ``model_type``, which completes a ``config.json``.

    ``AutoConfig`` is not used: other imported packages (such as fla, for Mamba) register their own classes there.
    """

    def complete(content: dict[str, Any]) -> Any:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

        return getattr(transformers, CONFIG_MAPPING_NAMES[model_type]).from_dict(content)

    return complete


GATED_FFN = named([(name, name) for name in ("gate_proj", "up_proj", "down_proj")])  # SwiGLU under its usual names


def expert_lines(theirs: str, count: int, names: tuple[str, str, str]) -> Iterator[Line]:
    """Lines of gate, up and down maps of ``count`` experts with their ``names``. If merged, gate and up of all are one tensor."""
    gate_up = f"{theirs}.gate_up_proj"
    merged = part(gate_up, "gate_proj", 0, 2, 1), part(gate_up, "up_proj", 1, 2, 1), same(f"{theirs}.down_proj", "down_proj")
    for line, name in zip(merged, names, strict=True):
        yield replace(stack(line.ours[0], [f"{theirs}.{e}.{name}.weight" for e in range(count)]), merged=line)


def rope(theirs: Any) -> tuple[float, float]:
    """Base of the rotary angles and rotated part of a head; raise ValueError for scaled angles."""
    parameters = theirs.rope_parameters
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(f"{theirs.model_type}: rope_type must be 'default' to be read, but is {parameters['rope_type']!r}")
    return float(parameters["rope_theta"]), float(parameters.get("partial_rotary_factor", 1.0))


def rope_parameters_of(softmax: Any) -> dict[str, Any]:
    """Rotary parameters of our softmax mixer in transformers' form."""
    return {"rope_type": "default", "rope_theta": softmax.base, "partial_rotary_factor": softmax.rotated / softmax.size}
