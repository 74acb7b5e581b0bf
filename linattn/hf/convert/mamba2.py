"""transformers' Mamba-2."""

from __future__ import annotations

import math
from typing import Any

from linattn.hf.convert.common import back, base, transformers_config
from linattn.hf.convert.mamba import OLDER, backbone
from linattn.hf.convert.table import Family, mixer_of, named, only, same, split
from linattn.models import LMConfig

MIXER = [  # published name, ours
    split("in_proj.weight", "g_proj.weight", "in_proj.weight"),
    same("conv1d.weight", "conv.weight"),
    same("conv1d.bias", "conv.bias"),
    *named([("A_log", "A_log"), ("D", "D"), ("dt_bias", "dt_bias")], ""),
    same("norm.weight", "norm.weight", -1),
    same("out_proj.weight", "o_proj.weight"),
]


def fields(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    only(theirs, "mamba2", hidden_act="silu", use_bias=False, use_conv_bias=True)
    mixer = {
        "expand": int(theirs.expand), "head_dim": theirs.head_dim, "state_size": theirs.state_size, "groups": theirs.n_groups,
        "conv_width": theirs.conv_kernel, "eps": theirs.layer_norm_epsilon,
    }  # fmt: skip
    low, high = map(float, theirs.time_step_limit)
    if (low, high) != (0.0, math.inf):
        mixer["step_limits"] = [low, high]
    return base(theirs) | {
        "mixer": "mamba2", "mixer_options": {"mamba2": mixer}, "ffn": "none", "norm_eps": theirs.layer_norm_epsilon,
    }  # fmt: skip


def config(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    mixer = mixer_of(ours, "mamba2")
    return back(ours) | {
        "expand": mixer.inner // ours.dim, "head_dim": mixer.inner // mixer.heads, "num_heads": mixer.heads,
        "state_size": mixer.state_size, "n_groups": mixer.groups, "conv_kernel": mixer.conv.width,
        "layer_norm_epsilon": ours.norm_eps, "time_step_limit": mixer.step_limits or [0.0, math.inf],
    }  # fmt: skip


FAMILIES = {
    "mamba2": Family(
        "mamba2", "Mamba2ForCausalLM", ("backbone.embeddings.weight", "lm_head.weight"), transformers_config("mamba2"), fields,
        config, lambda ours: backbone(ours, MIXER), OLDER,
    )
}  # fmt: skip
