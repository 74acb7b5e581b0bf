"""RWKV-6 and RWKV-7 with the names of flash-linear-attention 0.6.0. A block of fla is two layers of linattn.

fla's models mix the previous token into a token by μ, our channel mixing by 1 − μ, which is rounded in the conversion.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from linattn.hf.convert.common import back, base, blocks
from linattn.hf.convert.fla import COMMON, TIED, complete
from linattn.hf.convert.table import Family, Line, mixer_of, named, only, same, transposed, under
from linattn.mixers.parts import to_float32
from linattn.models import LMConfig

RWKV6_DEFAULTS = {
    "expand_k": 0.5, "expand_v": 1.0, "hidden_ratio": 3.5, "num_heads": 4, "proj_low_rank_dim": 32, "gate_low_rank_dim": 64,
    "hidden_act": "sqrelu", "norm_first": True, "norm_bias": True, "norm_eps": 1e-5,
}  # fmt: skip
RWKV7_DEFAULTS = {
    "hidden_ratio": 4, "head_dim": 64, "num_heads": None, "decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64,
    "v_low_rank_dim": 16, "hidden_act": "sqrelu", "norm_first": True, "norm_bias": True, "norm_eps": 1e-5, "value_dim": None,
}  # fmt: skip
_FIVE = "rwkvg"  # fla's order
_RANKS = {"w": "decay_low_rank_dim", "g": "gate_low_rank_dim", "a": "a_low_rank_dim", "v": "v_low_rank_dim"}  # our letter -> fla's name


def _stack(theirs: Any, name: str, ratio: float, mixer: dict[str, Any], gated: bool) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig, for either version."""
    only(theirs, theirs.model_type, hidden_act="sqrelu", norm_first=True, norm_bias=True, attn=None)
    ratio = ratio if theirs.hidden_ratio is None else theirs.hidden_ratio
    hidden = -(-int(theirs.hidden_size * ratio) // 32) * 32 if theirs.intermediate_size is None else theirs.intermediate_size
    return base(theirs) | {
        "layers": 2 * theirs.num_hidden_layers, "mixer": f"{name}, rwkv_channel", "ffn": "none", "norm": "layer",
        "norm_eps": theirs.norm_eps, "embedding_norm": True,
        "mixer_options": {name: mixer, "rwkv_channel": {"hidden": hidden, "gated": gated}},
    }  # fmt: skip


def _config(ours: LMConfig, defaults: dict[str, Any]) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config, for either version."""
    published = {**COMMON, **defaults, **back(ours), "num_hidden_layers": ours.layers // 2, "norm_eps": ours.norm_eps}
    del published["rope_parameters"], published["attnres_block_size"]
    return published | {"intermediate_size": mixer_of(ours, "rwkv_channel").k_proj.out_features}


def fields6(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    only(theirs, "rwkv6", expand_k=1.0, expand_v=1.0)
    ranks = {"mix_rank": theirs.proj_low_rank_dim, "decay_rank": theirs.gate_low_rank_dim}
    mixer = {"head_size": theirs.hidden_size // theirs.num_heads, "eps": theirs.norm_eps, **ranks}
    return _stack(theirs, "rwkv6", 3.5, mixer, True)


def config6(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    mixer = mixer_of(ours, "rwkv6")
    ranks = {"proj_low_rank_dim": mixer.time_maa_w2.shape[1], "gate_low_rank_dim": mixer.time_decay_w2.shape[0]}
    return _config(ours, RWKV6_DEFAULTS) | {"expand_k": 1.0, "expand_v": 1.0, "num_heads": mixer.heads, **ranks}


def fields7(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    only(theirs, "rwkv7", value_dim=(None, theirs.hidden_size, [theirs.hidden_size] * theirs.num_hidden_layers))
    size = theirs.hidden_size // theirs.num_heads if theirs.head_dim is None else theirs.head_dim
    ranks = {letter: getattr(theirs, name) for letter, name in _RANKS.items()}
    if missing := [_RANKS[letter] for letter, rank in ranks.items() if rank is None]:
        raise ValueError(f"rwkv7: {', '.join(missing)} must be given to be read")
    return _stack(theirs, "rwkv7", 4, {"head_size": size, "rank": ranks, "eps": size * theirs.norm_eps}, False)


def config7(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    mixer = mixer_of(ours, "rwkv7")
    sizes = {"num_hidden_layers": blocks(ours), "head_dim": ours.dim // mixer.heads, "num_heads": mixer.heads}
    ranks = {name: getattr(mixer, f"{letter}1").shape[1] for letter, name in _RANKS.items() if hasattr(mixer, f"{letter}1")}
    ranks["v_low_rank_dim"] = mixer_of(ours, "rwkv7", last=True).v1.shape[1]  # the first layer lacks this map
    return _config(ours, RWKV7_DEFAULTS) | sizes | ranks


def weights(name: str, ours: LMConfig) -> Iterator[Line]:
    """Lines of all weights but embedding and head."""
    norms = [("model.layers.0.pre_norm", "model.embedding_norm"), ("model.norm", "model.norm")]
    for i in range(ours.layers // 2):
        block, time, channel = f"model.layers.{i}", f"model.layers.{2 * i}", f"model.layers.{2 * i + 1}"
        norms += [(f"{block}.attn_norm", f"{time}.mixer_norm"), (f"{block}.ffn_norm", f"{channel}.mixer_norm")]
        yield from under(f"{block}.attn.", f"{time}.mixer.", _time6() if name == "rwkv6" else _time7(first=i == 0))
        yield from under(f"{block}.ffn.", f"{channel}.mixer.", CHANNEL6 if name == "rwkv6" else CHANNEL7)
    for part in (".weight", ".bias"):
        yield from named(norms, part)


def _complement(theirs: str, ours: str) -> Line:
    """Convert our 1 − μ to μ in float32, because bfloat16 near 1 cannot represent a small μ."""
    return Line((theirs,), (ours,), lambda t, _: [1 - to_float32(t[0])], lambda t: [1 - to_float32(t[0])])


CHANNEL6 = [
    _complement("key.mu", "time_mix_key"), _complement("receptance.mu", "time_mix_receptance"),
    *named([("key.linear", "k_proj"), ("receptance.linear", "r_proj"), ("value", "o_proj")]),
]  # fmt: skip
CHANNEL7 = [_complement("x_k", "time_mix_key"), *named([("key", "k_proj"), ("value", "o_proj")])]


def _time6() -> Iterator[Line]:
    mixes = tuple(f"time_maa_{letter}" for letter in _FIVE)
    order = [_FIVE.index(letter) for letter in "wkvrg"], ["wkvrg".index(letter) for letter in _FIVE]  # published -> ours, and back
    yield same("x_proj.0.mu", "time_maa_x")
    yield Line(("x_bias",), mixes, lambda t, _: list(t[0].unbind()), lambda t: [torch.stack(t)])
    yield Line(  # published [5 R, D], ours [D, 5 R]
        ("x_proj.0.linear.weight",), ("time_maa_w1",),
        lambda t, _: [t[0].unflatten(0, (5, -1))[order[0]].flatten(0, 1).mT.contiguous()],
        lambda t: [t[0].mT.unflatten(0, (5, -1))[order[1]].flatten(0, 1).contiguous()],
    )  # fmt: skip
    yield Line(  # published [D, 5 R], ours [5, R, D]
        ("x_proj.2.weight",), ("time_maa_w2",),
        lambda t, _: [t[0].unflatten(1, (5, -1)).permute(1, 2, 0)[order[0]].contiguous()],
        lambda t: [t[0][order[1]].permute(2, 0, 1).flatten(1).contiguous()],
    )  # fmt: skip
    yield from named([(f"{letter}_proj.linear", f"{letter}_proj") for letter in "rkvg"])
    yield from _low_rank("w_proj.linear.lora", "time_decay_w1", "time_decay_w2", "time_decay")
    yield same("bonus", "time_faaaa")
    yield from [same("g_norm.weight", "norm.weight"), same("g_norm.bias", "norm.bias"), same("o_proj.weight", "o_proj.weight")]


def _time7(*, first: bool) -> Iterator[Line]:
    for letter in "rwkvag":
        yield same(f"x_{letter}", f"x_{letter}", 1, 1, -1)
    for letter in "wag" if first else "wagv":
        yield from _low_rank(f"{letter}_lora.lora", f"{letter}1", f"{letter}2", None if letter == "g" else f"{letter}0")
    yield from named([(name, name) for name in ("k_k", "k_a", "r_k")], "")
    yield from named([(f"{letter}_proj", f"{letter}_proj") for letter in "rkvo"])
    yield from [same("g_norm.weight", "norm.weight"), same("g_norm.bias", "norm.bias")]


def _low_rank(theirs: str, down: str, up: str, bias: str | None) -> Iterator[Line]:
    yield from (transposed(f"{theirs}.0.weight", down), transposed(f"{theirs}.2.weight", up))
    if bias is not None:
        yield same(f"{theirs}.2.bias", bias)


FAMILIES = {
    "rwkv6": Family(
        "rwkv6", "RWKV6ForCausalLM", TIED, partial(complete, "rwkv6", RWKV6_DEFAULTS), fields6, config6, partial(weights, "rwkv6")
    ),
    "rwkv7": Family(
        "rwkv7", "RWKV7ForCausalLM", TIED, partial(complete, "rwkv7", RWKV7_DEFAULTS), fields7, config7, partial(weights, "rwkv7")
    ),
}
