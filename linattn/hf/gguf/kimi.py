"""Kimi Linear in llama.cpp's format: Kimi delta attention beside latent attention, a dense layer or more and then experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from linattn.hf.convert.table import ffn_of, mixer_of, repeated
from linattn.models import LMConfig

_EXPERTS = {
    "router.weight": "ffn_gate_inp.weight", "score_bias": "exp_probs_b.bias", "gate_proj": "ffn_gate_exps.weight",
    "up_proj": "ffn_up_exps.weight", "down_proj": "ffn_down_exps.weight",
    **{f"shared.{name}_proj.weight": f"ffn_{name}_shexp.weight" for name in ("gate", "up", "down")},
}  # fmt: skip
_DENSE = {f"{name}_proj.weight": f"ffn_{name}.weight" for name in ("gate", "up", "down")}
_KDA = {
    "b_proj.weight": "ssm_beta.weight", "norm.weight": "ssm_norm.weight", "o_proj.weight": "attn_output.weight",
    **{f"{ours}.{i}.weight": f"ssm_{theirs}_{'ab'[i]}.weight" for ours, theirs in (("decay_proj", "f"), ("g_proj", "g")) for i in (0, 1)},
}  # fmt: skip
_MLA = {
    "q_proj.weight": "attn_q.weight", "latent_proj.weight": "attn_kv_a_mqa.weight", "norm.weight": "attn_kv_a_norm.weight",
    "o_proj.weight": "attn_output.weight",
}  # fmt: skip
MATRICES = (
    "attn_q", "attn_k", "attn_v", "attn_output", "attn_kv_a_mqa", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_exps", "ffn_up_exps",
    "ffn_down_exps", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
)  # fmt: skip
_SIGMOID = 2  # llama.cpp's number of the scores of experts


def metadata(ours: LMConfig) -> dict[str, Any]:
    """Metadata without the architecture's name; raises ValueError for what llama.cpp lacks."""
    kda, mla, experts = mixer_of(ours, "kda"), mixer_of(ours, "mla"), ffn_of(ours, "experts")
    dense = ours.ffn_names.index("experts")
    if set(ours.ffn_names[dense:]) != {"experts"}:
        raise ValueError(f"llama.cpp has dense layers only before the experts, but the model has {', '.join(ours.ffn_names)}")
    if kda.heads != mla.heads:
        raise ValueError(f"llama.cpp has one number of heads for all layers, but the model has {kda.heads} in kda and {mla.heads} in mla")
    if not mla.shared:
        raise ValueError("llama.cpp has shared > 0 in mla, but the model has 0")
    if not experts.renormalize:
        raise ValueError("llama.cpp has renormalize = True in experts, but the model has False")
    hidden, key = experts.up_proj.shape[1], mla.head_dim + mla.shared
    return {
        "block_count": ours.layers, "feed_forward_length": ffn_of(ours, "swiglu").up_proj.out_features if dense else hidden,
        "attention.head_count": mla.heads, "attention.head_count_kv": [int(name == "mla") for name in ours.mixer_names],
        "attention.layer_norm_rms_epsilon": ours.norm_eps, "attention.kv_lora_rank": mla.rank,
        "attention.key_length": mla.rank + mla.shared, "attention.value_length": mla.rank, "attention.key_length_mla": key,
        "attention.value_length_mla": mla.value_dim, "rope.dimension_count": mla.shared, "ssm.conv_kernel": kda.conv.width,
        "kda.head_dim": kda.size, "expert_count": experts.count, "expert_used_count": experts.active,
        "expert_feed_forward_length": hidden, "expert_shared_count": experts.shared.up_proj.out_features // hidden,
        "expert_gating_func": _SIGMOID, "expert_weights_norm": True, "expert_weights_scale": float(experts.scale),
        "leading_dense_block_count": dense,
    }  # fmt: skip


def tensors(ours: LMConfig, w: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name. The map from latents to keys is transposed, because llama.cpp applies it to the queries, as we do."""
    yield "output_norm.weight", w["model.norm.weight"]
    mla = mixer_of(ours, "mla")
    for i, (mixer, ffn) in enumerate(zip(ours.mixer_names, ours.ffn_names, strict=True)):
        there, block, own = f"blk.{i}.", f"model.layers.{i}.", f"model.layers.{i}.mixer."
        yield there + "attn_norm.weight", w[block + "mixer_norm.weight"]
        yield there + "ffn_norm.weight", w[block + "ffn_norm.weight"]
        for name, theirs in (_KDA if mixer == "kda" else _MLA).items():
            yield there + theirs, w[own + name].flatten() if name == "norm.weight" else w[own + name]
        if mixer == "kda":
            parts = zip("qkv", w[own + "qkv_proj.weight"].chunk(3), w[own + "conv.weight"].chunk(3), strict=True)
            for letter, weight, conv in parts:
                yield f"{there}attn_{letter}.weight", weight
                yield f"{there}ssm_conv1d_{letter}.weight", conv  # [channels, 1, width]
            yield there + "ssm_a", -w[own + "A_log"].float().exp()[:, None]  # [H, 1]
            yield there + "ssm_dt.bias", w[own + "dt_bias"].flatten()
        else:
            key, value = w[own + "kv_proj.weight"].unflatten(0, (mla.heads, -1)).split((mla.head_dim, mla.value_dim), 1)
            yield there + "attn_k_b.weight", key.mT  # [H, rank, head_dim]
            yield there + "attn_v_b.weight", value  # [H, value_dim, rank]
        for name, theirs in (_EXPERTS if ffn == "experts" else _DENSE).items():
            yield there + theirs, w[f"{block}ffn.{name}"]


def fields(metadata: Any) -> dict[str, Any]:
    """Fields of our config from the metadata of a file."""
    if metadata.count("expert_gating_func", _SIGMOID) != _SIGMOID or metadata.get("attention.q_lora_rank", 0):
        raise ValueError("kimi-linear.expert_gating_func must be 2 and kimi-linear.attention.q_lora_rank 0 to be read")
    heads, eps, size = metadata.count("attention.head_count"), metadata.number("attention.layer_norm_rms_epsilon"), metadata.count
    layers, dense, shared = size("block_count"), int(metadata.get("leading_dense_block_count", 0)), size("rope.dimension_count")
    kinds = metadata.layers("attention.head_count_kv", layers)
    hidden = size("expert_feed_forward_length")
    experts = {
        "hidden": hidden, "count": size("expert_count"), "active": size("expert_used_count"), "scores": "sigmoid", "renormalize": True,
        "scale": metadata.number("expert_weights_scale", 1.0), "shared": hidden * size("expert_shared_count"),
    }  # fmt: skip
    mla = {
        "heads": heads, "rank": size("attention.kv_lora_rank"), "head_dim": size("attention.key_length_mla") - shared, "shared": shared,
        "value_dim": size("attention.value_length_mla"),
    }  # fmt: skip
    kda = {"heads": heads, "size": size("kda.head_dim"), "conv_width": size("ssm.conv_kernel"), "eps": eps}
    ffns = {"swiglu": {"hidden": size("feed_forward_length")}, "experts": experts}
    return {
        "layers": layers, "mixer": repeated(["mla" if count else "kda" for count in kinds]), "norm_eps": eps,
        "mixer_options": {"kda": kda, "mla": mla},
        "ffn": repeated(["swiglu" if i < dense else "experts" for i in range(layers)]),
        "ffn_options": ffns if dense else {"experts": experts},
    }  # fmt: skip


def read(ours: LMConfig, tensor: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under our names but embedding and head; ``tensor`` reads one of the file."""
    yield "model.norm.weight", tensor("output_norm.weight")
    for i, (mixer, ffn) in enumerate(zip(ours.mixer_names, ours.ffn_names, strict=True)):
        there, block, own = f"blk.{i}.", f"model.layers.{i}.", f"model.layers.{i}.mixer."
        yield block + "mixer_norm.weight", tensor(there + "attn_norm.weight")
        yield block + "ffn_norm.weight", tensor(there + "ffn_norm.weight")
        for name, theirs in (_KDA if mixer == "kda" else _MLA).items():
            yield own + name, tensor(there + theirs)
        if mixer == "kda":
            yield own + "qkv_proj.weight", torch.cat([tensor(f"{there}attn_{letter}.weight") for letter in "qkv"])
            convs = [tensor(f"{there}ssm_conv1d_{letter}.weight") for letter in "qkv"]
            yield own + "conv.weight", torch.cat([conv.reshape(-1, conv.shape[-1]) for conv in convs])
            yield own + "A_log", (-tensor(there + "ssm_a")).log()
            yield own + "dt_bias", tensor(there + "ssm_dt.bias")
        else:
            yield own + "kv_proj.weight", torch.cat([tensor(there + "attn_k_b.weight").mT, tensor(there + "attn_v_b.weight")], 1)
        for name, theirs in (_EXPERTS if ffn == "experts" else _DENSE).items():
            yield f"{block}ffn.{name}", tensor(there + theirs)
