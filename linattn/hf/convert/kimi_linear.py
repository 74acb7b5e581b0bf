"""transformers' Kimi Linear: Kimi Delta Attention and latent attention without positions, a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from linattn.hf.convert.common import GATED_FFN, back, base, expert_lines, transformers_config
from linattn.hf.convert.table import Family, Line, ffn_of, join, mixer_of, named, only, repeated, same, some, under
from linattn.models import LMConfig

_KINDS = {"linear_attention": "kda", "full_attention": "mla"}
_FFNS = {"dense": "swiglu", "sparse": "experts"}
_NORMS = [("input_layernorm", "mixer_norm"), ("post_attention_layernorm", "ffn_norm")]

MODULES = {  # published names -> names of transformers' modules
    r"\.forget_gate\.": ".",
    r"\.mlp\.(gate|experts|shared_experts)\.": r".block_sparse_moe.\1.",
    r"\.block_sparse_moe\.(gate|up|down)_proj\.": r".mlp.\1_proj.",  # dense layers, as transformers saves them
}
MLA = [  # published name, ours
    *named([("kv_a_proj_with_mqa", "latent_proj"), ("kv_a_layernorm", "norm"), ("kv_b_proj", "kv_proj")]),
    *named([("q_proj", "q_proj"), ("o_proj", "o_proj")]),
]


def fields(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    heads = theirs.num_attention_heads
    only(
        theirs, "kimi_linear", hidden_act="silu", attention_bias=False, q_lora_rank=None, num_key_value_heads=heads, n_group=1, topk_group=1
    )
    if "sparse" in theirs.mlp_layer_types:
        some(theirs, "kimi_linear", "n_shared_experts")
    kda = {
        "heads": theirs.linear_num_heads, "size": theirs.linear_head_dim, "conv_width": theirs.linear_conv_kernel_dim,
        "eps": theirs.rms_norm_eps,
    }  # fmt: skip
    mla = {
        "heads": heads, "rank": theirs.kv_lora_rank, "head_dim": theirs.qk_nope_head_dim, "shared": theirs.qk_rope_head_dim,
        "value_dim": theirs.v_head_dim,
    }  # fmt: skip
    experts = {
        "hidden": theirs.moe_intermediate_size, "count": theirs.num_local_experts, "active": theirs.num_experts_per_tok,
        "scores": "sigmoid", "renormalize": theirs.norm_topk_prob, "scale": theirs.routed_scaling_factor,
        "shared": theirs.moe_intermediate_size * theirs.n_shared_experts,
    }  # fmt: skip
    mixers, ffns = [_KINDS[kind] for kind in theirs.layer_types], [_FFNS[kind] for kind in theirs.mlp_layer_types]
    chosen = {"kda": kda, "mla": mla, "experts": experts, "swiglu": {"hidden": theirs.intermediate_size}}
    return base(theirs) | {
        "mixer": repeated(mixers), "mixer_options": {name: chosen[name] for name in dict.fromkeys(mixers)},
        "ffn": repeated(ffns), "ffn_options": {name: chosen[name] for name in dict.fromkeys(ffns)}, "norm_eps": theirs.rms_norm_eps,
        "tie_embeddings": False,
    }  # fmt: skip


def config(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    kinds, ffns = ({name: kind for kind, name in table.items()} for table in (_KINDS, _FFNS))
    published = back(ours) | {
        "tie_word_embeddings": False, "rms_norm_eps": ours.norm_eps, "layer_types": [kinds.get(name, name) for name in ours.mixer_names],
        "mlp_layer_types": [ffns.get(name, name) for name in ours.ffn_names],
    }  # fmt: skip
    if "kda" in ours.mixer_names:
        kda = mixer_of(ours, "kda")
        published |= {"linear_num_heads": kda.heads, "linear_head_dim": kda.size, "linear_conv_kernel_dim": kda.conv.width}
    if "mla" in ours.mixer_names:
        mla = mixer_of(ours, "mla")
        published |= {
            "num_attention_heads": mla.heads, "num_key_value_heads": mla.heads, "kv_lora_rank": mla.rank, "q_lora_rank": None,
            "qk_nope_head_dim": mla.head_dim, "qk_rope_head_dim": mla.shared, "v_head_dim": mla.value_dim,
        }  # fmt: skip
    if "swiglu" in ours.ffn_names:
        published["intermediate_size"] = ffn_of(ours, "swiglu").up_proj.out_features
    if "experts" in ours.ffn_names:
        experts = ffn_of(ours, "experts")
        hidden, shared = experts.up_proj.shape[1], 0 if experts.shared is None else experts.shared.up_proj.out_features
        published |= {
            "moe_intermediate_size": hidden, "num_local_experts": experts.count, "num_experts_per_tok": experts.active,
            "norm_topk_prob": experts.renormalize, "routed_scaling_factor": experts.scale, "n_shared_experts": shared // hidden,
            "n_group": 1, "topk_group": 1,
        }  # fmt: skip
    return published


def weights(ours: LMConfig) -> Iterator[Line]:
    """Lines of all weights but embedding and head."""
    yield same("model.norm.weight", "model.norm.weight")
    for i, (mixer, ffn) in enumerate(zip(ours.mixer_names, ours.ffn_names, strict=True)):
        theirs, own = f"model.layers.{i}.", f"model.layers.{i}."
        yield from under(theirs, own, named(_NORMS))
        yield from under(f"{theirs}self_attn.", f"{own}mixer.", MLA if mixer == "mla" else _kda(mixer_of(ours, mixer)))
        if ffn == "swiglu":
            yield from under(f"{theirs}mlp.", f"{own}ffn.", GATED_FFN)
        else:
            yield from under(f"{theirs}block_sparse_moe.", f"{own}ffn.", _experts(ffn_of(ours, ffn).count))


def _kda(mixer: Any) -> Iterator[Line]:
    rows = 3 * [mixer.heads * mixer.size]
    yield join("qkv_proj.weight", [f"{name}_proj.weight" for name in "qkv"], rows)
    yield replace(join("conv.weight", [f"{name}_conv1d.weight" for name in "qkv"], rows), merged=same("conv1d.weight", "conv.weight"))
    for ours, theirs in (("decay_proj", "f"), ("g_proj", "g")):
        yield from named([(f"{theirs}_a_proj", f"{ours}.0"), (f"{theirs}_b_proj", f"{ours}.1")])
    yield same("A_log", "A_log", 1, 1, -1, 1)
    yield same("dt_bias", "dt_bias", -1)
    yield from named([("b_proj", "b_proj"), ("o_norm", "norm"), ("o_proj", "o_proj")])


def _experts(count: int) -> Iterator[Line]:
    yield from (same("gate.weight", "router.weight"), same("gate.e_score_correction_bias", "score_bias"))
    yield from under("shared_experts.", "shared.", GATED_FFN)
    yield from expert_lines("experts", count, ("w1", "w3", "w2"))


FAMILIES = {
    "kimi_linear": Family(
        "kimi_linear", "KimiLinearForCausalLM", ("model.embed_tokens.weight", "lm_head.weight"), transformers_config("kimi_linear"),
        fields, config, weights, MODULES, ties=False,
    )
}  # fmt: skip
