"""transformers' RecurrentGemma (Griffin): RG-LRU and local attention, a scaled embedding and softly capped logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from linattn.hf.convert.common import ANGLES, back, base, rope, rope_parameters_of, transformers_config
from linattn.hf.convert.table import Family, Line, ffn_of, mixer_of, named, only, repeated, same, under
from linattn.models import LMConfig

_KINDS = {"recurrent": "rg_lru", "attention": "softmax"}
_GATES = ("input_gate_weight", "input_gate_bias", "recurrent_gate_weight", "recurrent_gate_bias", "recurrent_param")
_NORMS = [("temporal_pre_norm", "mixer_norm"), ("channel_pre_norm", "ffn_norm")]

RECURRENT = [  # published name, ours
    *(line for p in (".weight", ".bias") for line in named([("linear_x", "x_proj"), ("linear_y", "y_proj"), ("linear_out", "o_proj")], p)),
    *(line for p in (".weight", ".bias") for line in named([("conv_1d", "conv")], p)),
    *(same(f"rg_lru.{name}", name) for name in _GATES),
]
FFN = [line for p in (".weight", ".bias") for line in named([(n, n) for n in ("gate_proj", "up_proj", "down_proj")], p)]


def fields(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    only(theirs, "recurrent_gemma", hidden_activation="gelu_pytorch_tanh")
    turn, fraction = rope(theirs)
    recurrent = {"heads": theirs.num_attention_heads, "width": theirs.lru_width, "conv_width": theirs.conv1d_width}
    softmax = {
        "heads": theirs.num_attention_heads, "kv_heads": theirs.num_key_value_heads, "head_dim": theirs.head_dim, "base": turn,
        "rotated": int(theirs.head_dim * fraction), "window": theirs.attention_window_size, "bias": theirs.attention_bias,
        "out_bias": True,
    }  # fmt: skip
    kinds = [theirs.block_types[i % len(theirs.block_types)] for i in range(theirs.num_hidden_layers)]
    mixers = [_KINDS[kind] for kind in kinds]
    chosen = {"rg_lru": recurrent, "softmax": softmax}
    return base(theirs) | {
        "mixer": repeated(mixers), "mixer_options": {name: chosen[name] for name in dict.fromkeys(mixers)},
        "ffn": "geglu", "ffn_options": {"geglu": {"hidden": theirs.intermediate_size // 2, "bias": True}},
        "norm": "zero_centered_rms", "norm_eps": theirs.rms_norm_eps, "logit_soft_cap": theirs.logits_soft_cap,
        "embedding_scale": _scale(theirs.hidden_size),
    }  # fmt: skip


def _scale(dim: int) -> float:
    """Square root of the width, rounded as in the published model."""
    return torch.tensor(dim**0.5, dtype=torch.bfloat16, device="cpu").item()


def config(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    published = back(ours) | {"rms_norm_eps": ours.norm_eps, "logits_soft_cap": ours.logit_soft_cap or 30.0}
    kinds = {name: kind for kind, name in _KINDS.items()}
    published["block_types"] = [kinds.get(name, name) for name in ours.mixer_names]
    published["intermediate_size"] = 2 * ffn_of(ours, "geglu").up_proj.out_features
    if "rg_lru" in ours.mixer_names:
        recurrent = mixer_of(ours, "rg_lru")
        published |= {
            "num_attention_heads": recurrent.heads, "lru_width": recurrent.x_proj.out_features, "conv1d_width": recurrent.conv.width,
        }  # fmt: skip
    if "softmax" in ours.mixer_names:
        softmax = mixer_of(ours, "softmax")
        published |= {
            "num_attention_heads": softmax.heads, "head_dim": softmax.size, "num_key_value_heads": softmax.kv_heads,
            "attention_window_size": softmax.window or 2048, "attention_bias": softmax.q_proj.bias is not None,
            "rope_parameters": rope_parameters_of(softmax),
        }  # fmt: skip
    return published


def weights(ours: LMConfig) -> Iterator[Line]:
    """Lines of all weights but embedding and head."""
    yield same("model.final_norm.weight", "model.norm.weight")
    for i, mixer in enumerate(ours.mixer_names):
        theirs, own = f"model.layers.{i}.", f"model.layers.{i}."
        yield from under(theirs, own, named(_NORMS))
        yield from under(f"{theirs}mlp_block.", f"{own}ffn.", FFN)
        yield from under(f"{theirs}temporal_block.", f"{own}mixer.", RECURRENT if mixer == "rg_lru" else _softmax(mixer_of(ours, mixer)))


def _softmax(mixer: Any) -> Iterator[Line]:
    yield same("o_proj.bias", "o_proj.bias")
    yield from named([(name, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")])
    if mixer.q_proj.bias is not None:
        yield from named([(name, name) for name in ("q_proj", "k_proj", "v_proj")], ".bias")


FAMILIES = {
    "recurrent_gemma": Family(
        "recurrent_gemma", "RecurrentGemmaForCausalLM", ("model.embed_tokens.weight", "lm_head.weight"),
        transformers_config("recurrent_gemma"), fields, config, weights, ignored=ANGLES,
    )
}  # fmt: skip
