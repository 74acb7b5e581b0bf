"""transformers' RWKV, which is RWKV-4. A block of transformers is two layers of linattn: time mixing and channel mixing.

``rescale_every`` halves activations and weights against overflow in float16. It affects only the epsilon of norms, and our models
omit it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from linattn.hf.convert.common import back, base, blocks, transformers_config
from linattn.hf.convert.table import Family, Line, mixer_of, named, only, same, under
from linattn.models import LMConfig

_PROJECTIONS = [("receptance", "r_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")]
_CHANNEL = [("receptance", "r_proj"), ("key", "k_proj"), ("value", "o_proj")]
_MIXES = ("time_mix_key", "time_mix_receptance", "time_mix_value")  # the last one only in time mixing
_NORM = ("weight", "bias")

TIME = [  # published name, ours
    *named([("time_decay", "time_decay"), ("time_first", "time_first")], ""),
    *(same(name, name, 1, 1, -1) for name in _MIXES),
    *named(_PROJECTIONS),
]
CHANNEL = [*(same(name, name, 1, 1, -1) for name in _MIXES[:2]), *named(_CHANNEL)]


def fields(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    only(theirs, "rwkv", attention_hidden_size=theirs.hidden_size, layer_norm_epsilon=1e-5)
    return base(theirs) | {
        "layers": 2 * theirs.num_hidden_layers, "mixer": "rwkv4, rwkv_channel", "ffn": "none", "norm": "layer", "embedding_norm": True,
        "mixer_options": {"rwkv_channel": {"hidden": theirs.intermediate_size}},
    }  # fmt: skip


def config(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config, without ``rescale_every``, which would change the weights in evaluation mode."""
    return back(ours) | {
        "num_hidden_layers": blocks(ours), "attention_hidden_size": ours.dim, "layer_norm_epsilon": ours.norm_eps,
        "intermediate_size": mixer_of(ours, "rwkv_channel").k_proj.out_features, "rescale_every": 0,
    }  # fmt: skip


def weights(ours: LMConfig) -> Iterator[Line]:
    """Lines of all weights but embedding and head."""
    norms = [("rwkv.blocks.0.pre_ln", "model.embedding_norm"), ("rwkv.ln_out", "model.norm")]
    for i in range(ours.layers // 2):
        block, time, channel = f"rwkv.blocks.{i}", f"model.layers.{2 * i}", f"model.layers.{2 * i + 1}"
        norms += [(f"{block}.ln1", f"{time}.mixer_norm"), (f"{block}.ln2", f"{channel}.mixer_norm")]
        yield from under(f"{block}.attention.", f"{time}.mixer.", TIME)
        yield from under(f"{block}.feed_forward.", f"{channel}.mixer.", CHANNEL)
    for part in _NORM:
        yield from named(norms, f".{part}")


FAMILIES = {
    "rwkv": Family(
        "rwkv", "RwkvForCausalLM", ("rwkv.embeddings.weight", "head.weight"), transformers_config("rwkv"), fields, config, weights
    )
}
