"""transformers' Mamba and Falcon Mamba, which has norms without weights inside its mixers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from linattn.hf.convert.common import back, base, transformers_config
from linattn.hf.convert.table import Family, Line, mixer_of, named, only, same, split, under
from linattn.models import LMConfig

MIXER = [  # published name, ours
    split("in_proj.weight", "in_proj.weight", "g_proj.weight"),
    same("conv1d.weight", "conv.weight"),
    same("conv1d.bias", "conv.bias"),
    same("dt_proj.bias", "dt_bias"),
    *named([("A_log", "A_log"), ("D", "D")], ""),
    *named([("x_proj", "x_proj"), ("dt_proj", "dt_proj"), ("out_proj", "o_proj")]),
]

OLDER = {r"^backbone\.embedding\.": "backbone.embeddings."}


def fields(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    norms = theirs.model_type == "falcon_mamba"
    only(theirs, theirs.model_type, hidden_act="silu", use_bias=False, use_conv_bias=True)
    if norms:
        only(theirs, theirs.model_type, mixer_rms_eps=1e-6)
    expand, rest = divmod(theirs.intermediate_size, theirs.hidden_size)
    if rest:
        raise ValueError(f"{theirs.model_type}: intermediate_size {theirs.intermediate_size} must be a multiple of hidden_size")
    sizes = {"expand": expand, "state_size": theirs.state_size, "rank": int(theirs.time_step_rank), "conv_width": theirs.conv_kernel}
    mixer = {**sizes, "norms": norms}
    return base(theirs) | {
        "mixer": "mamba", "mixer_options": {"mamba": mixer}, "ffn": "none", "norm_eps": theirs.layer_norm_epsilon,
    }  # fmt: skip


def config(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    mixer = mixer_of(ours, "mamba")
    return back(ours) | {
        "intermediate_size": mixer.inner, "expand": mixer.inner // ours.dim, "state_size": mixer.state_size,
        "time_step_rank": mixer.rank, "conv_kernel": mixer.conv.width, "layer_norm_epsilon": ours.norm_eps,
    }  # fmt: skip


def backbone(ours: LMConfig, mixer: list[Line]) -> Iterator[Line]:
    """Lines of all weights but embedding and head of either Mamba, with the lines of a ``mixer``."""
    yield same("backbone.norm_f.weight", "model.norm.weight")
    for i in range(ours.layers):
        yield same(f"backbone.layers.{i}.norm.weight", f"model.layers.{i}.mixer_norm.weight")
        yield from under(f"backbone.layers.{i}.mixer.", f"model.layers.{i}.mixer.", mixer)


def _family(name: str, architecture: str) -> Family:
    tied = ("backbone.embeddings.weight", "lm_head.weight")
    return Family(name, architecture, tied, transformers_config(name), fields, config, lambda ours: backbone(ours, MIXER), OLDER)


FAMILIES = {"mamba": _family("mamba", "MambaForCausalLM"), "falcon_mamba": _family("falcon_mamba", "FalconMambaForCausalLM")}
