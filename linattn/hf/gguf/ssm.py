"""Mamba and Mamba-2 in GGUF files, in transformers' format: config, names of tensors, and values that llama.cpp stores in another form."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor

_BLOCK = {
    "attn_norm.weight": "norm.weight", "ssm_in.weight": "mixer.in_proj.weight", "ssm_conv1d.weight": "mixer.conv1d.weight",
    "ssm_conv1d.bias": "mixer.conv1d.bias", "ssm_a": "mixer.A_log", "ssm_d": "mixer.D", "ssm_out.weight": "mixer.out_proj.weight",
}  # fmt: skip
NAMES = {  # names of a block's tensors by architecture
    "mamba": _BLOCK | {
        "ssm_x.weight": "mixer.x_proj.weight", "ssm_dt.weight": "mixer.dt_proj.weight", "ssm_dt.bias": "mixer.dt_proj.bias",
    },
    "mamba2": _BLOCK | {"ssm_dt.bias": "mixer.dt_bias", "ssm_norm.weight": "mixer.norm.weight"},
}  # fmt: skip
_ENDS = {
    "token_embd.weight": "backbone.embeddings.weight", "output_norm.weight": "backbone.norm_f.weight", "output.weight": "lm_head.weight",
}  # fmt: skip


def config(metadata: Any) -> dict[str, Any]:
    """Fields of the ``config.json`` besides those of every model; ``metadata`` is that of the GGUF file.

    Raises:
        ValueError: for a model with norms of B, C and Δ (Falcon-Mamba), and for sizes that do not divide.
    """
    if metadata.get("ssm.dt_b_c_rms", False):
        raise ValueError(f"{metadata.architecture}.ssm.dt_b_c_rms must be false to be read")
    dim, inner, rank = metadata.count("embedding_length"), metadata.count("ssm.inner_size"), metadata.count("ssm.time_step_rank")
    if inner % dim or (metadata.architecture == "mamba2" and inner % rank):
        raise ValueError(f"{metadata.architecture}.ssm.inner_size must be a multiple of {dim} and of the heads, but is {inner}")
    content = {
        "model_type": metadata.architecture, "intermediate_size": inner, "expand": inner // dim,
        "state_size": metadata.count("ssm.state_size"), "conv_kernel": metadata.count("ssm.conv_kernel"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"), "use_bias": False, "use_conv_bias": True,
    }  # fmt: skip
    if metadata.architecture == "mamba":
        return content | {"time_step_rank": rank}
    heads = {"num_heads": rank, "head_dim": inner // rank, "n_groups": metadata.count("ssm.group_count")}
    return content | heads | {"time_step_limit": [0.0, math.inf]}


def named(name: str, architecture: str) -> str:
    """Name of a tensor in transformers; an unknown one keeps its own."""
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if found and found[2] in NAMES[architecture]:
        return f"backbone.layers.{found[1]}.{NAMES[architecture][found[2]]}"
    return _ENDS.get(name, name)


def shape(name: str, there: tuple[int, ...], architecture: str) -> tuple[int, ...]:
    """Shape of a tensor in transformers, from that in the file."""
    if name.endswith("conv1d.weight"):
        return (there[0], 1, *there[1:])
    if architecture == "mamba2" and name.endswith((".A_log", ".D", "mixer.norm.weight")):
        return (math.prod(there),)
    return there


def value(name: str, t: Tensor, architecture: str) -> Tensor:
    """Value of a tensor in transformers; the file has -exp(A_log) in place of A_log."""
    t = t.reshape(shape(name, tuple(t.shape), architecture))
    return (-t).log() if name.endswith(".A_log") else t
