"""transformers' MiniMax: lightning and softmax attention, experts, and residuals that start after the norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from linattn.hf.convert.common import ANGLES, back, base, expert_lines, rope, transformers_config
from linattn.hf.convert.table import Family, Line, ffn_of, made, mixer_of, named, only, repeated, same, under
from linattn.models import LMConfig

_KINDS = {"linear_attention": "lightning", "full_attention": "softmax"}
_SCALES = {"lightning": "linear_attn", "softmax": "full_attn", "experts": "mlp"}  # our name -> prefix of their factors
_NORMS = [("input_layernorm", "mixer_norm"), ("post_attention_layernorm", "ffn_norm")]
_BLOCK = 256  # tokens of a published block, which determines only the sizes of buffers

LIGHTNING = named([("qkv_proj", "qkv_proj"), ("output_gate", "g_proj"), ("norm", "norm"), ("out_proj", "o_proj")])  # published name, ours
SOFTMAX = named([(name, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")])


def fields(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    only(theirs, "minimax", hidden_act="silu")
    heads, size = theirs.num_attention_heads, theirs.head_dim or theirs.hidden_size // theirs.num_attention_heads
    turn, _ = rope(theirs)  # the published class rotates all channels and ignores the fraction
    softmax = {"heads": heads, "kv_heads": theirs.num_key_value_heads, "head_dim": size, "base": turn, "window": theirs.sliding_window}
    chosen = {"lightning": {"heads": heads, "head_dim": size}, "softmax": softmax}
    mixers = [_KINDS[kind] for kind in theirs.layer_types]
    places = [{"layer": i, "layers": len(mixers)} if name == "lightning" else {} for i, name in enumerate(mixers)]
    experts = {"hidden": theirs.intermediate_size, "count": theirs.num_local_experts, "active": theirs.num_experts_per_tok}
    factors = {ours: [float(getattr(theirs, f"{name}_{part}_factor")) for part in ("alpha", "beta")] for ours, name in _SCALES.items()}
    return base(theirs) | {
        "mixer": repeated(mixers), "mixer_options": {name: chosen[name] for name in dict.fromkeys(mixers)}, "layer_options": places,
        "ffn": "experts", "ffn_options": {"experts": experts}, "norm_eps": theirs.rms_norm_eps, "block": "normed",
        "residual_scales": {name: pair for name, pair in factors.items() if name in [*mixers, "experts"] and pair != [1.0, 1.0]},
    }  # fmt: skip


def config(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    kinds = {name: kind for kind, name in _KINDS.items()}
    experts = ffn_of(ours, "experts")
    published = back(ours) | {
        "rms_norm_eps": ours.norm_eps, "layer_types": [kinds.get(name, name) for name in ours.mixer_names],
        "intermediate_size": experts.up_proj.shape[1], "num_local_experts": experts.count, "num_experts_per_tok": experts.active,
        "block_size": _BLOCK,
    }  # fmt: skip
    for name, theirs in _SCALES.items():
        alpha, beta = ours.residual_scales.get(name, (1.0, 1.0))
        published |= {f"{theirs}_alpha_factor": alpha, f"{theirs}_beta_factor": beta}
    if "lightning" in ours.mixer_names:
        lightning = mixer_of(ours, "lightning")
        size = lightning.g_proj.out_features // lightning.heads
        published |= {"num_attention_heads": lightning.heads, "head_dim": size, "num_key_value_heads": lightning.heads}
    if "softmax" in ours.mixer_names:
        softmax = mixer_of(ours, "softmax")
        published |= {
            "num_attention_heads": softmax.heads, "head_dim": softmax.size, "num_key_value_heads": softmax.kv_heads,
            "sliding_window": softmax.window, "rope_parameters": {"rope_type": "default", "rope_theta": softmax.base},
        }  # fmt: skip
    return published


def weights(ours: LMConfig) -> Iterator[Line]:
    """Lines of all weights but embedding and head."""
    yield same("model.norm.weight", "model.norm.weight")
    count = ffn_of(ours, "experts").count
    for i, mixer in enumerate(ours.mixer_names):
        theirs, own = f"model.layers.{i}.", f"model.layers.{i}."
        yield from under(theirs, own, named(_NORMS))
        yield from under(f"{theirs}self_attn.", f"{own}mixer.", SOFTMAX if mixer == "softmax" else LIGHTNING)
        if mixer == "lightning":
            yield from under(f"{theirs}self_attn.", f"{own}mixer.", [_decays(mixer_of(ours, mixer).heads, i, ours.layers)])
        yield same(f"{theirs}block_sparse_moe.gate.weight", f"{own}ffn.router.weight")
        yield from under(f"{theirs}block_sparse_moe.", f"{own}ffn.", expert_lines("experts", count, ("w1", "w3", "w2")))


def _decays(heads: int, layer: int, layers: int) -> Line:
    """Lines of the buffers of decay rates in published layers."""

    def make() -> list[Tensor]:
        rate = ((2 ** (-8 / heads)) ** torch.arange(1, heads + 1))[:, None, None] * (1 - layer / (layers - 1 + 1e-5) + 1e-5)
        place = torch.arange(1, _BLOCK + 1)[:, None]
        age = place - place.mT
        mask = torch.where(age >= 0, torch.exp(-rate * age.clamp(min=0)), 0.0)[None]
        return [rate, torch.exp(-rate * place), torch.exp(-rate * (_BLOCK - place)), mask]

    return made(["slope_rate", "query_decay", "key_decay", "diagonal_decay"], make)


FAMILIES = {
    "minimax": Family(
        "minimax", "MiniMaxForCausalLM", ("model.embed_tokens.weight", "lm_head.weight"), transformers_config("minimax"), fields,
        config, weights, {r"\.mlp\.": ".block_sparse_moe."}, ANGLES,
    )
}  # fmt: skip
