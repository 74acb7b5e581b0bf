"""Models in llama.cpp's format: metadata and tensors of each family that can be written to a GGUF file.

A family is checked by its published config (:mod:`linattn.hf.convert`): models that it cannot express cannot run in llama.cpp either.
Metadata keys omit the architecture's name. Tensors have rows first; matrices may be stored in fewer bits, all other tensors are
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from linattn.hf.convert.table import mixer_of, repeated
from linattn.hf.gguf import kimi, minimax, qwen
from linattn.models import LMConfig

Weights = dict[str, Tensor]
Named = tuple[str, Tensor]


@dataclass(frozen=True)
class Written:
    """Architecture of llama.cpp.

    Args:
        mixers: our mixers, a pattern of layers.
        metadata: function of our config; raises ValueError for options that llama.cpp lacks.
        tensors: tensors of the model besides embedding and head, from our config and weights.
        matrices: last parts of the names of tensors that may be quantised.
        tied: True if a file may omit the head.
        published: name of the family in ``linattn.hf.convert``, if it is another one.
    """

    mixers: tuple[str, ...]
    metadata: Callable[[LMConfig], dict[str, Any]]
    tensors: Callable[[LMConfig, Weights], Iterator[Named]]
    matrices: tuple[str, ...]
    tied: bool = True
    published: str | None = None


def _only(name: str, came: Any, wanted: Any) -> None:
    if came != wanted:
        raise ValueError(f"llama.cpp has {name} = {wanted}, but the model has {came}")


def _ssm(ours: LMConfig, mixer: Any) -> dict[str, Any]:
    _only("expand", mixer.inner / ours.dim, 2)
    return {
        "block_count": ours.layers, "feed_forward_length": 0, "attention.head_count": 0, "ssm.conv_kernel": mixer.conv.width,
        "ssm.inner_size": mixer.inner, "ssm.state_size": mixer.state_size, "attention.layer_norm_rms_epsilon": ours.norm_eps,
    }  # fmt: skip


def _mamba_metadata(ours: LMConfig) -> dict[str, Any]:
    mixer = mixer_of(ours, "mamba")
    return _ssm(ours, mixer) | {"ssm.time_step_rank": mixer.rank, "ssm.dt_b_c_rms": False}


def _mamba2_metadata(ours: LMConfig) -> dict[str, Any]:
    mixer = mixer_of(ours, "mamba2")
    _only("step_limits", mixer.step_limits, None)
    return _ssm(ours, mixer) | {"ssm.time_step_rank": mixer.heads, "ssm.group_count": mixer.groups}


def _mamba(ours: LMConfig, w: Weights) -> Iterator[Named]:
    yield "output_norm.weight", w["model.norm.weight"]
    for i in range(ours.layers):
        own, there = f"model.layers.{i}.mixer.", f"blk.{i}."
        yield there + "attn_norm.weight", w[f"model.layers.{i}.mixer_norm.weight"]
        yield there + "ssm_in.weight", torch.cat([w[own + "in_proj.weight"], w[own + "g_proj.weight"]])
        yield from _convolution(there, own, w)
        yield there + "ssm_x.weight", w[own + "x_proj.weight"]
        yield there + "ssm_dt.weight", w[own + "dt_proj.weight"]
        yield there + "ssm_dt.bias", w[own + "dt_bias"]
        yield there + "ssm_a", -w[own + "A_log"].exp()  # [inner, N]
        yield there + "ssm_d", w[own + "D"]
        yield there + "ssm_out.weight", w[own + "o_proj.weight"]


def _mamba2(ours: LMConfig, w: Weights) -> Iterator[Named]:
    yield "output_norm.weight", w["model.norm.weight"]
    for i in range(ours.layers):
        own, there = f"model.layers.{i}.mixer.", f"blk.{i}."
        yield there + "attn_norm.weight", w[f"model.layers.{i}.mixer_norm.weight"]
        yield there + "ssm_in.weight", torch.cat([w[own + "g_proj.weight"], w[own + "in_proj.weight"]])
        yield from _convolution(there, own, w)
        yield there + "ssm_dt.bias", w[own + "dt_bias"]
        yield there + "ssm_a", -w[own + "A_log"].exp()[:, None]  # [H, 1]
        yield there + "ssm_d", w[own + "D"][:, None]
        yield there + "ssm_norm.weight", w[own + "norm.weight"]  # [groups, inner / groups]
        yield there + "ssm_out.weight", w[own + "o_proj.weight"]


def _convolution(there: str, own: str, w: Weights) -> Iterator[Named]:
    yield there + "ssm_conv1d.weight", w[own + "conv.weight"].squeeze(1)  # [channels, width]
    yield there + "ssm_conv1d.bias", w[own + "conv.bias"]


def _wkv(ours: LMConfig, mixer: Any) -> dict[str, Any]:
    """Metadata of RWKV-6 and RWKV-7; a block in the file is two layers of the model."""
    if abs(mixer.norm.eps - 64e-5) > 1e-9:
        _only("eps of the norm of a head", mixer.norm.eps, 64e-5)
    return {
        "block_count": ours.layers // 2, "feed_forward_length": mixer_of(ours, "rwkv_channel").k_proj.out_features,
        "attention.head_count": 0, "attention.layer_norm_epsilon": ours.norm_eps, "wkv.head_size": ours.dim // mixer.heads,
    }  # fmt: skip


def _rwkv6_metadata(ours: LMConfig) -> dict[str, Any]:
    mixer = mixer_of(ours, "rwkv6")
    ranks = {"time_mix_extra_dim": mixer.time_maa_w2.shape[1], "time_decay_extra_dim": mixer.time_decay_w2.shape[0]}
    return _wkv(ours, mixer) | ranks | {"rescale_every_n_layers": 0}


def comparable(ours: LMConfig) -> LMConfig:
    """Adapt our config for the comparison with the published classes: fla's RWKV-6 has one eps for all norms, llama.cpp that of RWKV-LM."""
    if "rwkv6" not in ours.mixer_names:
        return ours
    content = {f.name: getattr(ours, f.name) for f in fields(LMConfig)}
    options = {**ours.mixer_options, "rwkv6": {**ours.mixer_options.get("rwkv6", {}), "eps": ours.norm_eps}}
    return LMConfig(**content | {"mixer_options": options})


LOW_RANKS = {"w": "decay", "a": "iclr", "v": "value_residual_mix", "g": "gate"}  # of RWKV-7: our letter -> llama.cpp's name
RWKV_TIME = {"k_proj": "key", "v_proj": "value", "r_proj": "receptance", "o_proj": "output"}


def _rwkv7_metadata(ours: LMConfig) -> dict[str, Any]:
    mixer = mixer_of(ours, "rwkv7", last=True)
    ranks = {f"attention.{name}_lora_rank": getattr(mixer, f"{letter}1").shape[1] for letter, name in LOW_RANKS.items()}
    return _wkv(ours, mixer) | ranks


def rwkv_norms(ours: LMConfig) -> Iterator[tuple[str, str]]:
    """Names of the norms of RWKV-6 and RWKV-7 in the file, and ours; each has a weight and a bias."""
    yield from (("token_embd_norm", "model.embedding_norm"), ("output_norm", "model.norm"))
    for i in range(ours.layers // 2):
        there, first, second = f"blk.{i}.", f"model.layers.{2 * i}", f"model.layers.{2 * i + 1}"
        yield from ((there + "attn_norm", first + ".mixer_norm"), (there + "attn_norm_2", second + ".mixer_norm"))
        yield there + "time_mix_ln", first + ".mixer.norm"


def _rwkv(ours: LMConfig, w: Weights, time: Callable[[int, str, Weights], Iterator[Named]], gated: bool) -> Iterator[Named]:
    for i in range(ours.layers // 2):
        there, first, second = f"blk.{i}.", f"model.layers.{2 * i}", f"model.layers.{2 * i + 1}"
        for name, theirs in RWKV_TIME.items():
            yield f"{there}time_mix_{theirs}.weight", w[f"{first}.mixer.{name}.weight"]
        for name, tensor in time(i, f"{first}.mixer.", w):
            yield f"{there}time_mix_{name}.weight", tensor
        yield there + "channel_mix_lerp_k.weight", 1 - w[second + ".mixer.time_mix_key"].float()
        yield there + "channel_mix_key.weight", w[second + ".mixer.k_proj.weight"]
        yield there + "channel_mix_value.weight", w[second + ".mixer.o_proj.weight"]
        if gated:
            yield there + "channel_mix_lerp_r.weight", 1 - w[second + ".mixer.time_mix_receptance"].float()
            yield there + "channel_mix_receptance.weight", w[second + ".mixer.r_proj.weight"]
    for theirs, name in rwkv_norms(ours):
        for part in (".weight", ".bias"):
            yield theirs + part, w[name + part]


def _time6(_: int, own: str, w: Weights) -> Iterator[Named]:
    """Time mixing of RWKV-6, by names after ``time_mix_``. The five mixes are in the order w, k, v, r, g on both sides."""
    yield "gate", w[own + "g_proj.weight"]
    yield "lerp_x", w[own + "time_maa_x"]
    yield "lerp_fused", torch.stack([w[f"{own}time_maa_{letter}"] for letter in "wkvrg"])[:, None, None]  # [5, 1, 1, D]
    yield "w1", w[own + "time_maa_w1"].mT  # [5 R, D]
    yield "w2", w[own + "time_maa_w2"].mT  # [5, D, R]
    yield "first", w[own + "time_faaaa"]
    yield "decay", w[own + "time_decay"]
    yield "decay_w1", w[own + "time_decay_w1"].mT
    yield "decay_w2", w[own + "time_decay_w2"].mT


def _time7(block: int, own: str, w: Weights) -> Iterator[Named]:
    """Time mixing of RWKV-7, by names after ``time_mix_``. llama.cpp requires maps of the value's residual in the first block too."""
    yield "lerp_fused", torch.stack([w[f"{own}x_{letter}"] for letter in "rwkvag"])[:, None, None]  # [6, 1, 1, D]
    for letter in "wavg":
        source = "a" if letter == "v" and not block else letter
        for part in "12" if letter == "g" else "012":
            t = w[f"{own}{source}{part}"]
            yield f"{letter}{part}", t if part == "0" else t.mT
    for name in ("k_k", "k_a", "r_k"):
        yield name, w[own + name].flatten()


_TIME = ("time_mix_key", "time_mix_value", "time_mix_receptance", "time_mix_output", "channel_mix_key", "channel_mix_value")
_SSM = ("ssm_in", "ssm_out")

FAMILIES = {
    "qwen3next": Written(("gated_deltanet", "softmax"), qwen.metadata, qwen.tensors, qwen.MATRICES, published="qwen3_next"),
    "kimi-linear": Written(("kda", "mla"), kimi.metadata, kimi.tensors, kimi.MATRICES, tied=False, published="kimi_linear"),
    "minimax-01": Written(("lightning", "softmax"), minimax.metadata, minimax.tensors, minimax.MATRICES, published="minimax"),
    "mamba": Written(("mamba",), _mamba_metadata, _mamba, _SSM),
    "mamba2": Written(("mamba2",), _mamba2_metadata, _mamba2, _SSM),
    "rwkv6": Written(
        ("rwkv6", "rwkv_channel"), _rwkv6_metadata, lambda ours, w: _rwkv(ours, w, _time6, True),
        (*_TIME, "time_mix_gate", "channel_mix_receptance"), tied=False,
    ),
    "rwkv7": Written(("rwkv7", "rwkv_channel"), _rwkv7_metadata, lambda ours, w: _rwkv(ours, w, _time7, False), _TIME, tied=False),
}  # fmt: skip


def family_of(ours: LMConfig) -> str:
    """Name of the architecture of a model with our config.

    Raises:
        ValueError: for a model of another family, listing the supported ones.
    """
    for name, family in FAMILIES.items():
        if set(ours.mixer_names) == set(family.mixers):
            return name
    layers = ", ".join(dict.fromkeys(ours.mixer_names))
    ways = ", ".join(dict.fromkeys(f'"{repeated(family.mixers)}"' for family in FAMILIES.values()))
    raise ValueError(f"llama.cpp has no model with layers of {layers} that can be written; for --to gguf train with --mixer one of {ways}")
