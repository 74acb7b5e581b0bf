"""MiniMax-01 in llama.cpp's format: lightning and softmax attention, experts in every layer, residuals that start after the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from linattn.hf.convert.table import ffn_of, mixer_of, repeated
from linattn.models import LMConfig

_LIGHTNING = {"qkv_proj": "attn_qkv", "g_proj": "attn_gate", "norm": "attn_norm_2", "o_proj": "attn_output"}
_SOFTMAX = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_EXPERTS = {"router.weight": "ffn_gate_inp", "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
MATRICES = ("attn_qkv", "attn_gate", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def metadata(ours: LMConfig) -> dict[str, Any]:
    """Metadata without the architecture's name; raises ValueError for what llama.cpp lacks."""
    lightning, softmax, experts = mixer_of(ours, "lightning"), mixer_of(ours, "softmax"), ffn_of(ours, "experts")
    scales = {name: ours.residual_scales.get(name, (1.0, 1.0)) for name in ("lightning", "softmax", "experts")}
    if len({tuple(pair) for pair in scales.values()}) > 1 or scales["experts"][1] != 1.0:
        raise ValueError(f"llama.cpp has one residual scale [a, 1.0] for all layers, but the model has {scales}")
    size = lightning.g_proj.out_features // lightning.heads
    if (lightning.heads, size) != (softmax.heads, softmax.size):
        raise ValueError(
            f"llama.cpp has equal heads in all layers, but the model has {lightning.heads} of {size} channels in lightning"
            f" and {softmax.heads} of {softmax.size} in softmax"
        )
    if softmax.window is not None:
        raise ValueError(f"llama.cpp has window = None in softmax layers, but the model has {softmax.window}")
    return {
        "block_count": ours.layers, "feed_forward_length": experts.up_proj.shape[1], "attention.head_count": softmax.heads,
        "attention.head_count_kv": softmax.kv_heads, "attention.key_length": size, "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": ours.norm_eps, "rope.freq_base": float(softmax.base), "rope.dimension_count": size,
        "expert_count": experts.count, "expert_used_count": experts.active, "residual_scale": float(scales["experts"][0]),
        "attention.recurrent_layers": [name == "lightning" for name in ours.mixer_names],
    }  # fmt: skip


def _names(ours: LMConfig) -> Iterator[tuple[str, str]]:
    """Names of tensors, ours and in the file."""
    yield "model.norm.weight", "output_norm.weight"
    for i, mixer in enumerate(ours.mixer_names):
        there, block = f"blk.{i}.", f"model.layers.{i}."
        yield block + "mixer_norm.weight", there + "attn_norm.weight"
        yield block + "ffn_norm.weight", there + "ffn_norm.weight"
        for name, theirs in (_LIGHTNING if mixer == "lightning" else _SOFTMAX).items():
            yield f"{block}mixer.{name}.weight", f"{there}{theirs}.weight"
        for name, theirs in _EXPERTS.items():
            yield f"{block}ffn.{name}", f"{there}{theirs}.weight"


def tensors(ours: LMConfig, w: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name."""
    for name, theirs in _names(ours):
        yield theirs, w[name].flatten() if "norm" in name else w[name]


def fields(metadata: Any) -> dict[str, Any]:
    """Fields of our config from the metadata of a file."""
    size, layers = metadata.count, metadata.count("block_count")
    recurrent = metadata.layers("attention.recurrent_layers", layers)
    mixers = ["lightning" if flag else "softmax" for flag in recurrent]
    heads, channels, scale = size("attention.head_count"), size("attention.key_length"), metadata.number("residual_scale")
    if metadata.count("rope.dimension_count", channels) != channels:
        raise ValueError(f"minimax-01.rope.dimension_count must be that of a head, {channels}, to be read")
    softmax = {
        "heads": heads, "kv_heads": size("attention.head_count_kv"), "head_dim": channels,
        "base": metadata.number("rope.freq_base", 10000.0),
    }  # fmt: skip
    options = {"lightning": {"heads": heads, "head_dim": channels}, "softmax": softmax}
    experts = {"hidden": size("feed_forward_length"), "count": size("expert_count"), "active": size("expert_used_count")}
    return {
        "layers": layers, "mixer": repeated(mixers), "mixer_options": {name: options[name] for name in dict.fromkeys(mixers)},
        "layer_options": [{"layer": i, "layers": layers} if flag else {} for i, flag in enumerate(recurrent)],
        "ffn": "experts", "ffn_options": {"experts": experts}, "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "block": "normed", "residual_scales": {} if scale == 1.0 else {name: [scale, 1.0] for name in [*options, "experts"]},
    }  # fmt: skip


def read(ours: LMConfig, tensor: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under our names but embedding and head; ``tensor`` reads one of the file."""
    for name, theirs in _names(ours):
        yield name, tensor(theirs)
