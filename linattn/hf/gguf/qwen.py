"""Qwen3-Next in llama.cpp's format: gated DeltaNet with a gated softmax layer at regular distances, and experts in every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from linattn.hf.convert import family
from linattn.hf.convert.table import ffn_of, mixer_of, repeated
from linattn.models import LanguageModel, LMConfig

_FFN = {
    "router": "ffn_gate_inp", "shared_gate": "ffn_gate_inp_shexp", "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    **{f"shared.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}  # fmt: skip
MATRICES = ("attn_qkv", "attn_gate", "attn_q", "attn_k", "attn_v", "attn_output", "ssm_out", *(n for n in _FFN.values() if "inp" not in n))


def metadata(ours: LMConfig) -> dict[str, Any]:
    """Metadata without the architecture's name; raises ValueError for layers in another order or without experts."""
    delta, softmax, experts = mixer_of(ours, "gated_deltanet"), mixer_of(ours, "softmax"), ffn_of(ours, "experts")
    every = ours.mixer_names.index("softmax") + 1
    if any((name == "softmax") != ((i + 1) % every == 0) for i, name in enumerate(ours.mixer_names)):
        raise ValueError(f"llama.cpp has a softmax layer after every {every - 1} others, but the model has {', '.join(ours.mixer_names)}")
    if set(ours.ffn_names) != {"experts"}:
        raise ValueError(f"llama.cpp has experts in every layer, but the model has {', '.join(dict.fromkeys(ours.ffn_names))}")
    if delta.key_size != delta.value_size:
        raise ValueError(f"llama.cpp has value_size = key_size = {delta.key_size}, but the model has {delta.value_size}")
    if softmax.q_proj.bias is not None:
        raise ValueError("llama.cpp has bias = False in softmax layers, but the model has True")
    if not experts.renormalize:
        raise ValueError("llama.cpp has renormalize = True in experts, but the model has False")
    hidden = experts.up_proj.shape[1]
    return {
        "block_count": ours.layers, "feed_forward_length": hidden, "attention.head_count": softmax.heads,
        "attention.head_count_kv": softmax.kv_heads, "attention.key_length": softmax.size, "attention.value_length": softmax.size,
        "attention.layer_norm_rms_epsilon": ours.norm_eps, "rope.freq_base": float(softmax.base), "rope.dimension_count": softmax.rotated,
        "expert_count": experts.count, "expert_used_count": experts.active, "expert_feed_forward_length": hidden,
        "expert_shared_feed_forward_length": experts.shared.up_proj.out_features, "full_attention_interval": every,
        "ssm.conv_kernel": delta.conv.width, "ssm.state_size": delta.key_size, "ssm.group_count": delta.heads,
        "ssm.time_step_rank": delta.value_heads, "ssm.inner_size": delta.value_heads * delta.value_size,
    }  # fmt: skip


def tensors(ours: LMConfig, w: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name. Queries and gates, β and decays are interleaved by head as in published files; norm weights include the added 1."""
    published: dict[str, Tensor] = {}
    for line in family("qwen3_next").lines(ours):
        published |= zip(line.theirs, line.write([w[name] for name in line.ours]), strict=True)
    yield "output_norm.weight", 1 + w["model.norm.weight"].float()
    for i, mixer in enumerate(ours.mixer_names):
        there, own, block = f"blk.{i}.", f"model.layers.{i}.mixer.", f"model.layers.{i}."
        yield there + "attn_norm.weight", 1 + w[block + "mixer_norm.weight"].float()
        yield there + "post_attention_norm.weight", 1 + w[block + "ffn_norm.weight"].float()
        if mixer == "softmax":
            yield there + "attn_q.weight", published[f"{block}self_attn.q_proj.weight"]
            for letter in "kv":
                yield f"{there}attn_{letter}.weight", w[f"{own}{letter}_proj.weight"]
            yield there + "attn_output.weight", w[own + "o_proj.weight"]
            for letter in "qk":
                yield f"{there}attn_{letter}_norm.weight", 1 + w[f"{own}{letter}_norm.weight"].float()
        else:
            yield there + "attn_qkv.weight", w[own + "qkv_proj.weight"]
            yield there + "attn_gate.weight", w[own + "g_proj.weight"]
            yield there + "ssm_ba.weight", published[f"{block}linear_attn.in_proj_ba.weight"]
            yield there + "ssm_conv1d.weight", w[own + "conv.weight"].squeeze(1)
            yield there + "ssm_dt.bias", w[own + "dt_bias"]
            yield there + "ssm_a", -w[own + "A_log"].float().exp()
            yield there + "ssm_norm.weight", w[own + "norm.weight"].flatten()
            yield there + "ssm_out.weight", w[own + "o_proj.weight"]
        for name, theirs in _FFN.items():
            key = f"{block}ffn.{name}"
            t = w[key if key in w else key + ".weight"]
            yield f"{there}{theirs}.weight", t.flatten() if name == "shared_gate" else t


def fields(metadata: Any) -> dict[str, Any]:
    """Fields of our config from the metadata of a file."""
    size, eps, layers = metadata.count, metadata.number("attention.layer_norm_rms_epsilon"), metadata.count("block_count")
    every, heads, value_heads = size("full_attention_interval", 4), size("attention.head_count"), size("ssm.time_step_rank")
    delta = {
        "heads": size("ssm.group_count"), "value_heads": value_heads, "key_size": size("ssm.state_size"),
        "value_size": size("ssm.inner_size") // value_heads, "conv_width": size("ssm.conv_kernel"), "eps": eps,
    }  # fmt: skip
    softmax = {
        "heads": heads, "kv_heads": size("attention.head_count_kv"), "head_dim": size("attention.key_length"),
        "base": metadata.number("rope.freq_base", 10000.0), "rotated": size("rope.dimension_count"), "norm_eps": eps, "gated": True,
    }  # fmt: skip
    experts = {
        "hidden": size("expert_feed_forward_length"), "count": size("expert_count"), "active": size("expert_used_count"),
        "renormalize": True, "shared": size("expert_shared_feed_forward_length"), "shared_gate": True,
    }  # fmt: skip
    mixers = ["gated_deltanet" if (i + 1) % every else "softmax" for i in range(layers)]
    options = {"gated_deltanet": delta, "softmax": softmax}
    return {
        "layers": layers, "mixer": repeated(mixers), "norm": "zero_centered_rms", "norm_eps": eps, "ffn": "experts",
        "ffn_options": {"experts": experts}, "mixer_options": {name: options[name] for name in dict.fromkeys(mixers)},
    }  # fmt: skip


def read(ours: LMConfig, tensor: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under our names but embedding and head; ``tensor`` reads one of the file."""
    with torch.device("meta"):
        hollow = LanguageModel(ours).state_dict()
    lines = {name: line for line in family("qwen3_next").lines(ours) for name in line.theirs}
    yield "model.norm.weight", tensor("output_norm.weight") - 1
    for i, mixer in enumerate(ours.mixer_names):
        there, own, block = f"blk.{i}.", f"model.layers.{i}.mixer.", f"model.layers.{i}."
        yield block + "mixer_norm.weight", tensor(there + "attn_norm.weight") - 1
        yield block + "ffn_norm.weight", tensor(there + "post_attention_norm.weight") - 1
        if mixer == "softmax":
            line, joint = lines[f"{block}self_attn.q_proj.weight"], tensor(there + "attn_q.weight")
            for letter in "kv":
                yield f"{own}{letter}_proj.weight", tensor(f"{there}attn_{letter}.weight")
            yield own + "o_proj.weight", tensor(there + "attn_output.weight")
            for letter in "qk":
                yield f"{own}{letter}_norm.weight", tensor(f"{there}attn_{letter}_norm.weight") - 1
        else:
            line, joint = lines[f"{block}linear_attn.in_proj_ba.weight"], tensor(there + "ssm_ba.weight")
            yield own + "qkv_proj.weight", tensor(there + "attn_qkv.weight")
            yield own + "g_proj.weight", tensor(there + "attn_gate.weight")
            yield own + "conv.weight", tensor(there + "ssm_conv1d.weight")
            yield own + "dt_bias", tensor(there + "ssm_dt.bias")
            yield own + "A_log", (-tensor(there + "ssm_a")).log()
            yield own + "norm.weight", tensor(there + "ssm_norm.weight")
            yield own + "o_proj.weight", tensor(there + "ssm_out.weight")
        yield from zip(line.ours, line.read([joint], [hollow[name].shape for name in line.ours]), strict=True)
        for name, theirs in _FFN.items():
            key = f"{block}ffn.{name}"
            yield key if key in hollow else key + ".weight", tensor(f"{there}{theirs}.weight")
