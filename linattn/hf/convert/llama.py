"""transformers' Llama and its relatives: Mistral, Qwen2, Qwen3 and Gemma 3's text models. SmolLM2 is a Llama.

They differ in biases, norms on queries and keys, windows by layer, and the norms of a block, which :class:`_Kind` lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from linattn import mixers
from linattn.hf.convert.common import ANGLES, GATED_FFN, TOKENS, back, base, transformers_config
from linattn.hf.convert.table import Family, Line, ffn_of, named, only, same, under
from linattn.mixers.rotary import SCALINGS
from linattn.models import LMConfig

FULL, SLIDING = "full_attention", "sliding_attention"
LENGTH = "max_position_embeddings"  # stored beside our fields, which do not use it, for the conversion back


@dataclass(frozen=True)
class _Kind:
    """Traits of one family.

    ``norms`` are the norms of a block under their names and ours. ``bias`` is True if q, k and v have biases, None if the
    config says so for these and for the output. ``qk_norm`` is the kind of norm on queries and keys. ``fixed`` are the values that a
    config must have to be read.
    """

    norms: tuple[tuple[str, str], ...] = (("input_layernorm", "mixer_norm"), ("post_attention_layernorm", "ffn_norm"))
    bias: bool | None = False
    qk_norm: str | None = None
    windows: str = "none"  # layers with a window: "none", "all", or "by layer", which layer_types lists
    gemma: bool = False
    fixed: tuple[tuple[str, Any], ...] = (("hidden_act", "silu"),)


KINDS = {
    "llama": _Kind(bias=None, fixed=(("hidden_act", "silu"), ("mlp_bias", False))),
    "mistral": _Kind(windows="all"),
    "qwen2": _Kind(bias=True, windows="by layer"),
    "qwen3": _Kind(bias=None, qk_norm="rms", windows="by layer"),
    "gemma3_text": _Kind(
        norms=(
            ("input_layernorm", "mixer_norm"), ("post_attention_layernorm", "mixer_post_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"), ("post_feedforward_layernorm", "ffn_post_norm"),
        ),
        bias=None, qk_norm="zero_centered_rms", windows="by layer", gemma=True,
        fixed=(
            ("hidden_activation", "gelu_pytorch_tanh"), ("attn_logit_softcapping", None), ("use_bidirectional_attention", (False, None)),
        ),
    ),
}  # fmt: skip


def _fields(kind: _Kind, theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    only(theirs, theirs.model_type, **dict(kind.fixed))
    size = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    bias = theirs.attention_bias if kind.bias is None else kind.bias
    shared = {
        "heads": theirs.num_attention_heads, "kv_heads": theirs.num_key_value_heads, "head_dim": size, "bias": bias,
        "out_bias": bias and kind.bias is None,
    }  # fmt: skip
    if kind.qk_norm is not None:
        shared |= {"norm_eps": theirs.rms_norm_eps, "norm": kind.qk_norm}
    if kind.gemma and theirs.query_pre_attn_scalar != size:
        shared["scale"] = theirs.query_pre_attn_scalar**-0.5
    types = _layer_types(kind, theirs)
    own = {name: _of_layers(kind, theirs, name) for name in dict.fromkeys(types)}
    ours = base(theirs) | {
        "mixer": "softmax", "norm_eps": theirs.rms_norm_eps, LENGTH: theirs.max_position_embeddings,
        "mixer_options": {"softmax": shared | (next(iter(own.values())) if len(own) == 1 else {})},
        "ffn": "swiglu", "ffn_options": {"swiglu": {"hidden": theirs.intermediate_size}},
    }  # fmt: skip
    if len(own) > 1:
        ours["layer_options"] = [own[name] for name in types]
    if kind.gemma:
        ours |= {
            "ffn": "geglu", "ffn_options": {"geglu": {"hidden": theirs.intermediate_size}}, "norm": "zero_centered_rms",
            "block": "sandwich", "embedding_scale": theirs.hidden_size**0.5, "logit_soft_cap": theirs.final_logit_softcapping,
        }  # fmt: skip
    return ours


def _layer_types(kind: _Kind, theirs: Any) -> list[str]:
    """Attention of each layer, FULL or SLIDING."""
    if kind.windows != "by layer":
        return [SLIDING if kind.windows == "all" and theirs.sliding_window is not None else FULL] * theirs.num_hidden_layers
    for name in theirs.layer_types:
        if name not in (FULL, SLIDING):
            raise ValueError(f"{theirs.model_type}: layer_types must be of {FULL!r} and {SLIDING!r} to be read, but has {name!r}")
    return list(theirs.layer_types)


def _of_layers(kind: _Kind, theirs: Any, layer_type: str) -> dict[str, Any]:
    """Options of the softmax layers of one type: window and rotary positions."""
    rope = theirs.rope_parameters[layer_type] if kind.gemma else theirs.rope_parameters
    options = {"base": float(rope["rope_theta"])} | _scaling(theirs.model_type, rope)
    if layer_type == SLIDING:
        if theirs.sliding_window is None:
            raise ValueError(f"{theirs.model_type}: sliding_window must be a number where layer_types has {SLIDING!r}, but is None")
        options["window"] = theirs.sliding_window
    return options


def _scaling(model_type: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Option ``scaling`` of our mixer from transformers' rotary parameters; empty if the angles are not scaled."""
    kind, known = rope.get("rope_type", "default"), ("default", *SCALINGS)
    if kind not in known or rope.get("partial_rotary_factor", 1.0) != 1 or not rope.get("truncate", True):
        wanted = f"{' or '.join(map(repr, known))}, with partial_rotary_factor 1 and truncate true"
        raise ValueError(f"{model_type}: rope_type must be {wanted}, to be read, but rope_parameters are {rope!r}")
    if kind == "default":
        return {}
    if kind == "yarn":
        said = {name: value for name, value in rope.items() if value is not None}
        rope = {"beta_fast": 32, "beta_slow": 1, **said, "attention_factor": _attention_factor(rope)}
    return {"scaling": {"rope_type": kind} | {name: rope[name] for name in SCALINGS[kind]}}


def _attention_factor(rope: dict[str, Any]) -> float:
    """YaRN's factor of queries and keys as transformers infers it (arXiv 2309.00071, equation 22)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    above, below = (rope.get(name) for name in ("mscale", "mscale_all_dim"))

    def root(weight: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    return root(above) / root(below) if above and below else root(1.0)


def _softmax_layers(ours: LMConfig) -> list[Any]:
    """Mixer of each layer, on the meta device."""
    if others := [name for name in ours.mixer_names if name != "softmax"]:
        raise ValueError(f"it has {', '.join(dict.fromkeys(others))} layers, but all must be softmax")
    with torch.device("meta"):
        return [mixers.create("softmax", dim=ours.dim, **ours.options_of(i)) for i in range(ours.layers)]


def _config(kind: _Kind, ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    layers = _softmax_layers(ours)
    one, windows = layers[0], sorted({layer.window for layer in layers if layer.window is not None})
    if len(windows) > 1:
        raise ValueError(f"its layers have windows of {', '.join(map(str, windows))} tokens, but all must be equal")
    types = {SLIDING if layer.window else FULL: layer for layer in reversed(layers)}
    published = back(ours) | {
        "rms_norm_eps": ours.norm_eps, "num_attention_heads": one.heads, "num_key_value_heads": one.kv_heads, "head_dim": one.size,
        "intermediate_size": ffn_of(ours, "geglu" if kind.gemma else "swiglu").up_proj.out_features,
    }  # fmt: skip
    if kind.bias is None:
        published["attention_bias"] = one.q_proj.bias is not None
    if getattr(ours, LENGTH, None) is not None:
        published[LENGTH] = getattr(ours, LENGTH)
    rope = {name: _rope_parameters(layer) for name, layer in types.items()}
    published["rope_parameters"] = rope if kind.gemma else next(iter(rope.values()))
    if kind.windows != "none":
        published["sliding_window"] = windows[0] if windows else None
    if kind.windows == "by layer":
        published["layer_types"] = [SLIDING if layer.window else FULL for layer in layers]
    if kind.windows == "by layer" and not kind.gemma:
        published["use_sliding_window"] = bool(windows)
    if kind.gemma:
        published |= {
            "final_logit_softcapping": ours.logit_soft_cap,
            "query_pre_attn_scalar": one.size if one.scale is None else round(one.scale**-2),
        }  # fmt: skip
    return published


def _rope_parameters(softmax: Any) -> dict[str, Any]:
    """Rotary parameters of our softmax mixer in transformers' form."""
    if softmax.rotated != softmax.size:
        raise ValueError(f"it rotates {softmax.rotated} of the {softmax.size} channels of a head, but all must be rotated")
    return {"rope_type": "default"} | (softmax.scaling or {}) | {"rope_theta": softmax.base}


def _weights(kind: _Kind, ours: LMConfig) -> Iterator[Line]:
    """Lines of all weights but embedding and head."""
    yield same("model.norm.weight", "model.norm.weight")
    for i, mixer in enumerate(_softmax_layers(ours)):
        theirs, own = f"model.layers.{i}.", f"model.layers.{i}."
        yield from under(theirs, own, named(kind.norms))
        yield from under(f"{theirs}mlp.", f"{own}ffn.", GATED_FFN)
        yield from under(f"{theirs}self_attn.", f"{own}mixer.", _attention(mixer))


def _attention(mixer: Any) -> Iterator[Line]:
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
        module = getattr(mixer, name)
        if module is not None:
            yield same(f"{name}.weight", f"{name}.weight")
            if getattr(module, "bias", None) is not None:
                yield same(f"{name}.bias", f"{name}.bias")


def _family(model_type: str, architecture: str) -> Family:
    kind = KINDS[model_type]
    return Family(
        model_type, architecture, ("model.embed_tokens.weight", "lm_head.weight"), transformers_config(model_type),
        lambda theirs: _fields(kind, theirs), lambda ours: _config(kind, ours), lambda ours: _weights(kind, ours), ignored=ANGLES,
    )  # fmt: skip


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
FAMILIES = {name: _family(name, architecture) for name, architecture in _ARCHITECTURES.items()}


def _text_config(content: dict[str, Any]) -> Any:
    """Config of the text part of a Gemma 3 that reads images; it inherits the tie of embedding and head and special tokens."""
    text = content.get("text_config", {})
    if not isinstance(text, dict):
        raise ValueError(f"gemma3: text_config must be the config of the text part, but is {text!r}")
    shared = {name: content[name] for name in ("tie_word_embeddings", *TOKENS) if content.get(name) is not None}
    return FAMILIES["gemma3_text"].config_of(shared | text)


def _refused(_: LMConfig) -> dict[str, Any]:
    raise ValueError("gemma3 also reads images; gemma3_text is its text part")


_PART = r"(model\.)?"
# The text part of Gemma3ForConditionalGeneration; the vision tower and its projection are ignored.
FAMILIES["gemma3"] = replace(
    FAMILIES["gemma3_text"],
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    config_of=_text_config,
    config=_refused,
    aliases={
        r"^language_model\.lm_head": "lm_head",
        rf"^language_model\.{_PART}": "model.",
        r"^model\.language_model\.": "model.",
    },
    ignored=rf"{ANGLES}|^{_PART}(vision_tower|multi_modal_projector)\.",
)
