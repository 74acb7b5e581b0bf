"""Models of flash-linear-attention whose blocks are a mixer and SwiGLU: GLA, RetNet, DeltaNet, Gated DeltaNet, KDA, HGRN2.

Names and defaults are those of its version 0.6.0. Its options beyond the papers' (short convolutions on GLA, feature maps,
attention layers in between, residuals over depth) are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Size, Tensor

from linattn.hf.convert.common import GATED_FFN, back, base
from linattn.hf.convert.table import Family, Line, ffn_of, join, mixer_of, named, only, same, under
from linattn.models import LMConfig

COMMON = {  # fields of all fla configs with their defaults
    "hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 32000, "intermediate_size": None, "hidden_ratio": 4, "norm_eps": 1e-6,
    "hidden_act": "swish", "attn": None, "attnres_block_size": None, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None, "rope_parameters": None,
}  # fmt: skip
TIED = ("model.embeddings.weight", "lm_head.weight")
_NORMS = [("attn_norm", "mixer_norm"), ("mlp_norm", "ffn_norm")]


@dataclass(frozen=True)
class Kind:
    """Model family of fla: linattn mixer, defaults and fixed values of the fla config, mixer options in both directions, weight lines."""

    mixer: str
    architecture: str
    defaults: dict[str, Any]
    fixed: dict[str, Any]
    options: Callable[[Any], dict[str, Any]]
    published: Callable[[Any], dict[str, Any]]
    lines: Callable[[Any], Iterable[Line]]
    whole: Callable[[LMConfig], Iterable[Line]] = lambda ours: ()  # lines outside of the layers


def complete(model_type: str, defaults: dict[str, Any], content: dict[str, Any]) -> Any:
    """Complete a config with the defaults that a ``config.json`` leaves out."""
    return SimpleNamespace(**{**COMMON, **defaults, **content, "model_type": model_type})


def hidden_of(theirs: Any) -> int:
    """Inner width of SwiGLU: 2/3 of ``hidden_ratio`` widths, in steps of 256."""
    if theirs.intermediate_size is not None:
        return theirs.intermediate_size
    ratio = 4 if theirs.hidden_ratio is None else theirs.hidden_ratio
    return -(-int(theirs.hidden_size * ratio * 2 / 3) // 256) * 256


def _fields(kind: Kind, theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    heads = {name: (None, theirs.num_heads) for name in ("num_kv_heads", "num_v_heads") if name in kind.fixed}  # equal to num_heads
    only(theirs, theirs.model_type, hidden_act="swish", attn=None, attnres_block_size=None, **kind.fixed | heads)
    return base(theirs) | {
        "mixer": kind.mixer, "mixer_options": {kind.mixer: kind.options(theirs)}, "ffn_dim": hidden_of(theirs),
        "norm_eps": theirs.norm_eps,
    }  # fmt: skip


def _config(kind: Kind, ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    published = {**COMMON, **kind.defaults, **back(ours), "norm_eps": ours.norm_eps}
    del published["rope_parameters"]
    published["intermediate_size"] = ffn_of(ours, "swiglu").up_proj.out_features
    return published | kind.published(mixer_of(ours, kind.mixer))


def _weights(kind: Kind, ours: LMConfig) -> Iterator[Line]:
    """Lines of all weights but embedding and head."""
    yield same("model.norm.weight", "model.norm.weight")
    yield from kind.whole(ours)
    mixer = mixer_of(ours, kind.mixer)
    for i in range(ours.layers):
        theirs = own = f"model.layers.{i}."
        yield from under(theirs, own, named(_NORMS))
        yield from under(f"{theirs}attn.", f"{own}mixer.", kind.lines(mixer))
        yield from under(f"{theirs}mlp.", f"{own}ffn.", GATED_FFN)


def _joined(rows: list[int], convolution: bool = True) -> Iterator[Line]:
    """Lines of q, k and v, which are one map and one convolution in our mixer."""
    yield join("qkv_proj.weight", [f"{name}_proj.weight" for name in "qkv"], rows)
    if convolution:
        yield join("conv.weight", [f"{name}_conv1d.weight" for name in "qkv"], rows)


def _plain(*names: str) -> list[Line]:
    return named([(name, name) for name in names])


def _gla(_: Any) -> Iterator[Line]:
    yield from _plain("q_proj", "k_proj", "v_proj", "g_proj", "o_proj")
    yield from named([("gk_proj.0", "decay_proj.0"), ("gk_proj.1", "decay_proj.1"), ("g_norm_swish_gate", "norm")])
    yield same("gk_proj.1.bias", "decay_proj.1.bias")


def _retnet(_: Any) -> Iterator[Line]:
    yield from [*_plain("q_proj", "k_proj", "v_proj", "g_proj", "o_proj"), same("g_norm_swish_gate.weight", "norm.weight")]


def _deltanet(mixer: Any) -> Iterator[Line]:
    yield from _joined(3 * [mixer.dim])
    yield from [*_plain("b_proj", "o_proj"), same("o_norm.weight", "norm.weight")]


def _gated_deltanet(mixer: Any) -> Iterator[Line]:
    yield from _joined([mixer.keys, mixer.keys, mixer.values])
    yield from [*_plain("a_proj", "b_proj", "g_proj", "o_proj"), same("o_norm.weight", "norm.weight")]
    yield from named([("A_log", "A_log"), ("dt_bias", "dt_bias")], "")


def _kda(mixer: Any) -> Iterator[Line]:
    yield from _joined(3 * [mixer.heads * mixer.size])
    yield from _plain("b_proj", "g_proj.0", "g_proj.1", "o_proj")
    yield from named([("f_proj.0", "decay_proj.0"), ("f_proj.1", "decay_proj.1"), ("o_norm", "norm")])
    yield from [same("g_proj.1.bias", "g_proj.1.bias"), same("A_log", "A_log"), same("dt_bias", "dt_bias", -1)]


def _hgrn2(_: Any) -> Iterator[Line]:
    yield from _plain("q_proj", "f_proj", "o_proj")
    yield from named([("i_proj", "v_proj"), ("g_norm", "norm")])


def _bounds(ours: LMConfig) -> Iterator[Line]:
    """Convert lower bounds: fla learns steps between layers, in a softmax over layers; linattn stores the bound of each layer.

    A constant added to all layers does not affect the softmax and is not restored.
    """

    def read(t: list[Tensor], _: list[Size]) -> list[Tensor]:
        steps = t[0].float().softmax(0)
        return list((steps.cumsum(0) - steps[0]).unbind())

    def write(t: list[Tensor]) -> list[Tensor]:
        bounds = torch.stack(t)
        steps = torch.cat([1 - bounds[-1:], bounds.diff(dim=0)])
        if not steps.is_meta and (bool(bounds[0].any()) or bool((steps < 0).any())):
            raise ValueError("hgrn2: lower bounds must begin at 0 and not fall from layer to layer to be written")
        return [steps.log()]

    yield Line(("model.lower_bounds",), tuple(f"model.layers.{i}.mixer.lower_bound" for i in range(ours.layers)), read, write)


KINDS = {
    "gla": Kind(
        "gla", "GLAForCausalLM",
        {"expand_k": 0.5, "expand_v": 1.0, "num_heads": 4, "num_kv_heads": None, "feature_map": None, "use_short_conv": False,
         "use_output_gate": True, "clamp_min": None, "elementwise_affine": True},
        {"num_kv_heads": None, "feature_map": None, "use_short_conv": False, "use_output_gate": True, "clamp_min": None,
         "elementwise_affine": True},
        lambda c: {"heads": c.num_heads, "key_ratio": c.expand_k, "value_ratio": c.expand_v, "eps": c.norm_eps},
        lambda m: {"num_heads": m.heads, "expand_k": m.q_proj.out_features / m.dim, "expand_v": m.v_proj.out_features / m.dim},
        _gla,
    ),
    "retnet": Kind(
        "retnet", "RetNetForCausalLM",
        {"hidden_ratio": 2, "expand_k": 1.0, "expand_v": 2.0, "num_heads": 8, "num_kv_heads": None, "feature_map": None,
         "use_short_conv": False, "use_output_gate": True, "elementwise_affine": True},
        {"expand_k": 1.0, "expand_v": 2.0, "num_kv_heads": None, "feature_map": None, "use_short_conv": False,
         "use_output_gate": True, "elementwise_affine": True},
        lambda c: {"heads": c.num_heads, "eps": c.norm_eps, "affine": True, "interleaved": False},
        lambda m: {"num_heads": m.heads},
        _retnet,
    ),
    "delta_net": Kind(
        "deltanet", "DeltaNetForCausalLM",
        {"expand_k": 1.0, "expand_v": 1.0, "use_gate": False, "use_short_conv": True, "allow_neg_eigval": False, "conv_size": 4,
         "use_beta": True, "use_output_norm": True, "num_heads": 16, "qk_norm": "l2", "qk_activation": "silu"},
        {"expand_k": 1.0, "expand_v": 1.0, "use_gate": False, "use_short_conv": True, "use_beta": True, "use_output_norm": True,
         "qk_norm": "l2", "qk_activation": "silu"},
        lambda c: {"heads": c.num_heads, "conv_width": c.conv_size, "negative_eigenvalues": c.allow_neg_eigval, "eps": c.norm_eps},
        lambda m: {"num_heads": m.heads, "conv_size": m.conv.width, "allow_neg_eigval": m.largest_beta == 2},
        _deltanet,
    ),
    "gated_deltanet": Kind(
        "gated_deltanet", "GatedDeltaNetForCausalLM",
        {"num_hidden_layers": 21, "expand_v": 2.0, "use_gate": True, "use_short_conv": True, "allow_neg_eigval": False, "conv_size": 4,
         "head_dim": 256, "num_heads": 6, "num_v_heads": None, "output_gate_activation": "swish"},
        {"use_gate": True, "use_short_conv": True, "output_gate_activation": ("swish", "silu")},
        lambda c: {
            "heads": c.num_heads, "value_heads": c.num_v_heads or c.num_heads, "key_size": c.head_dim,
            "value_size": int(c.head_dim * c.expand_v), "conv_width": c.conv_size, "eps": c.norm_eps,
            "negative_eigenvalues": c.allow_neg_eigval,
        },
        lambda m: {
            "num_heads": m.heads, "num_v_heads": m.value_heads, "head_dim": m.key_size, "expand_v": m.value_size / m.key_size,
            "conv_size": m.conv.width, "allow_neg_eigval": m.largest_beta == 2,
        },
        _gated_deltanet,
    ),
    "kda": Kind(
        "kda", "KDAForCausalLM",
        {"expand_v": 1.0, "use_short_conv": True, "allow_neg_eigval": False, "safe_gate": False, "lower_bound": None, "conv_size": 4,
         "head_dim": 128, "num_heads": 16, "num_v_heads": None},
        {"expand_v": 1.0, "use_short_conv": True, "safe_gate": False, "lower_bound": None, "num_v_heads": None},
        lambda c: {
            "heads": c.num_heads, "size": c.head_dim, "conv_width": c.conv_size, "eps": c.norm_eps, "gate_bias": True,
            "negative_eigenvalues": c.allow_neg_eigval,
        },
        lambda m: {"num_heads": m.heads, "head_dim": m.size, "conv_size": m.conv.width, "allow_neg_eigval": m.largest_beta == 2},
        _kda,
    ),
    "hgrn2": Kind(
        "hgrn2", "HGRN2ForCausalLM",
        {"num_heads": None, "expand_ratio": 128, "use_short_conv": False, "use_lower_bound": True, "elementwise_affine": True},
        {"use_short_conv": False, "use_lower_bound": True, "elementwise_affine": True},
        lambda c: {"head_dim": c.hidden_size // c.num_heads if c.expand_ratio is None else c.expand_ratio},
        lambda m: {"expand_ratio": m.dim // m.heads},
        _hgrn2, _bounds,
    ),
}  # fmt: skip


def _family(model_type: str, kind: Kind) -> Family:
    aliases = {r"\.attn\.g_norm\.": ".attn.g_norm_swish_gate."} if model_type in ("gla", "retnet") else {}  # names of unfused norms
    return Family(
        model_type, kind.architecture, TIED, partial(complete, model_type, kind.defaults), partial(_fields, kind),
        partial(_config, kind), partial(_weights, kind), aliases,
    )  # fmt: skip


FAMILIES = {model_type: _family(model_type, kind) for model_type, kind in KINDS.items()}
