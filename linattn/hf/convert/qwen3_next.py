"""transformers' Qwen3-Next: Gated DeltaNet and gated softmax attention, a mixture of experts with a gated shared one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from linattn.hf.convert.common import ANGLES, GATED_FFN, back, base, expert_lines, rope, rope_parameters_of, transformers_config
from linattn.hf.convert.table import Family, Line, ffn_of, interleaved, mixer_of, named, only, repeated, same, some, under
from linattn.models import LMConfig

_KINDS = {"linear_attention": "gated_deltanet", "full_attention": "softmax"}


def fields(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    only(theirs, "qwen3_next", hidden_act="silu")
    if theirs.num_experts:
        some(theirs, "qwen3_next", "shared_expert_intermediate_size")
    size = theirs.head_dim
    turn, fraction = rope(theirs)
    linear = {
        "heads": theirs.linear_num_key_heads, "value_heads": theirs.linear_num_value_heads, "key_size": theirs.linear_key_head_dim,
        "value_size": theirs.linear_value_head_dim, "conv_width": theirs.linear_conv_kernel_dim, "eps": theirs.rms_norm_eps,
    }  # fmt: skip
    softmax = {
        "heads": theirs.num_attention_heads, "kv_heads": theirs.num_key_value_heads, "head_dim": size, "base": turn,
        "rotated": int(size * fraction), "norm_eps": theirs.rms_norm_eps, "gated": True, "bias": theirs.attention_bias,
        "out_bias": theirs.attention_bias,
    }  # fmt: skip
    experts = {
        "hidden": theirs.moe_intermediate_size, "count": theirs.num_experts, "active": theirs.num_experts_per_tok,
        "renormalize": theirs.norm_topk_prob, "shared": theirs.shared_expert_intermediate_size, "shared_gate": True,
    }  # fmt: skip
    mixers = [_KINDS[kind] for kind in theirs.layer_types]
    ffns = ["experts" if _sparse(theirs, i) else "swiglu" for i in range(theirs.num_hidden_layers)]
    chosen = {"gated_deltanet": linear, "softmax": softmax}, {"experts": experts, "swiglu": {"hidden": theirs.intermediate_size}}
    return base(theirs) | {
        "mixer": repeated(mixers), "mixer_options": {name: chosen[0][name] for name in dict.fromkeys(mixers)},
        "ffn": repeated(ffns), "ffn_options": {name: chosen[1][name] for name in dict.fromkeys(ffns)},
        "norm": "zero_centered_rms", "norm_eps": theirs.rms_norm_eps,
    }  # fmt: skip


def _sparse(theirs: Any, layer: int) -> bool:
    return layer not in (theirs.mlp_only_layers or []) and theirs.num_experts > 0 and (layer + 1) % theirs.decoder_sparse_step == 0


def config(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    kinds = {name: kind for kind, name in _KINDS.items()}
    published = back(ours) | {"rms_norm_eps": ours.norm_eps, "num_experts": 0}
    published["layer_types"] = [kinds.get(name, name) for name in ours.mixer_names]
    if "gated_deltanet" in ours.mixer_names:
        linear = mixer_of(ours, "gated_deltanet")
        published |= {
            "linear_num_key_heads": linear.heads, "linear_key_head_dim": linear.key_size, "linear_num_value_heads": linear.value_heads,
            "linear_value_head_dim": linear.value_size, "linear_conv_kernel_dim": linear.conv.width,
        }  # fmt: skip
    if "softmax" in ours.mixer_names:
        softmax = mixer_of(ours, "softmax")
        published |= {
            "num_attention_heads": softmax.heads, "head_dim": softmax.size, "num_key_value_heads": softmax.kv_heads,
            "attention_bias": softmax.q_proj.bias is not None, "rope_parameters": rope_parameters_of(softmax),
        }  # fmt: skip
    if "swiglu" in ours.ffn_names:
        published["intermediate_size"] = ffn_of(ours, "swiglu").up_proj.out_features
    if "experts" in ours.ffn_names:
        experts = ffn_of(ours, "experts")
        published |= {
            "moe_intermediate_size": experts.up_proj.shape[1], "num_experts": experts.count, "num_experts_per_tok": experts.active,
            "norm_topk_prob": experts.renormalize,
            "shared_expert_intermediate_size": 0 if experts.shared is None else experts.shared.up_proj.out_features,
        }  # fmt: skip
    return published | {"mlp_only_layers": [i for i, name in enumerate(ours.ffn_names) if name != "experts"]}


def weights(ours: LMConfig) -> Iterator[Line]:
    """Lines of all weights but embedding and head."""
    yield same("model.norm.weight", "model.norm.weight")
    for i, (mixer, ffn) in enumerate(zip(ours.mixer_names, ours.ffn_names, strict=True)):
        theirs, own = f"model.layers.{i}.", f"model.layers.{i}."
        yield from under(theirs, own, named([("input_layernorm", "mixer_norm"), ("post_attention_layernorm", "ffn_norm")]))
        if mixer == "softmax":
            yield from under(f"{theirs}self_attn.", f"{own}mixer.", _softmax(mixer_of(ours, mixer)))
        else:
            yield from under(f"{theirs}linear_attn.", f"{own}mixer.", delta(mixer_of(ours, mixer)))
        lines = GATED_FFN if ffn == "swiglu" else _experts(ffn_of(ours, ffn).count)
        yield from under(f"{theirs}mlp.", f"{own}ffn.", lines)


def delta(mixer: Any) -> Iterator[Line]:
    """Map rows that are grouped by key head: q, k, v and the output gate, and β and the decay."""
    group = mixer.value_heads // mixer.heads
    rows = [mixer.key_size, mixer.key_size, group * mixer.value_size, group * mixer.value_size]
    yield interleaved("in_proj_qkvz.weight", ["qkv_proj.weight", "g_proj.weight"], mixer.heads, rows, [3, 1])
    yield interleaved("in_proj_ba.weight", ["b_proj.weight", "a_proj.weight"], mixer.heads, [group, group], [1, 1])
    yield from named([("A_log", "A_log"), ("dt_bias", "dt_bias")], "")
    yield from named([("conv1d", "conv"), ("norm", "norm"), ("out_proj", "o_proj")])


def _softmax(mixer: Any) -> Iterator[Line]:
    """Map the rows of q and the output gate, which are grouped by head."""
    rows = [mixer.size, mixer.size]
    for part in ("weight",) if mixer.q_proj.bias is None else ("weight", "bias"):
        yield interleaved(f"q_proj.{part}", [f"q_proj.{part}", f"g_proj.{part}"], mixer.heads, rows, [1, 1])
        yield from named([(name, name) for name in ("k_proj", "v_proj", "o_proj")], f".{part}")
    yield from named([("q_norm", "q_norm"), ("k_norm", "k_norm")])


def _experts(count: int) -> Iterator[Line]:
    yield from named([("gate", "router"), ("shared_expert_gate", "shared_gate")])
    yield from under("shared_expert.", "shared.", GATED_FFN)
    yield from expert_lines("experts", count, ("gate_proj", "up_proj", "down_proj"))


FAMILIES = {
    "qwen3_next": Family(
        "qwen3_next", "Qwen3NextForCausalLM", ("model.embed_tokens.weight", "lm_head.weight"), transformers_config("qwen3_next"),
        fields, config, weights, ignored=rf"^mtp\.|{ANGLES}",  # mtp: layers that predict further tokens
    )
}  # fmt: skip
