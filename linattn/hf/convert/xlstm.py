"""transformers' xLSTM, which is xLSTM-7B: mLSTM layers with SwiGLU.

Width and depth have two names each; the class uses ``num_blocks`` and ``hidden_size``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from linattn.hf.convert.common import back, base, transformers_config
from linattn.hf.convert.table import Family, Line, ffn_of, mixer_of, named, only, same, under
from linattn.models import LMConfig

MIXER = [  # published name, ours
    *named([("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("ogate_preact", "g_proj"), ("out_proj", "o_proj")]),
    *named([("multihead_norm", "norm"), ("igate_preact", "i_proj"), ("fgate_preact", "f_proj")]),
    *named([("igate_preact", "i_proj"), ("fgate_preact", "f_proj")], ".bias"),
]
FFN = named([("proj_up_gate", "gate_proj"), ("proj_up", "up_proj"), ("proj_down", "down_proj")])
KERNELS = ("chunkwise_kernel", "sequence_kernel", "step_kernel")
_NORMS = [("norm_mlstm", "mixer_norm"), ("norm_ffn", "ffn_norm")]


def complete(content: dict[str, Any]) -> Any:
    """Remove the kernel settings of a published config: they change no result, and the class accepts installed kernels only.

    Kernels with sigmoid input gates, which are of another model, are refused.
    """
    for name in KERNELS:
        if "siging" in str(content.get(name)):
            raise ValueError(f"xlstm: {name} must be one with exponential input gates to be read, but is {content[name]!r}")
    return transformers_config("xlstm")({name: value for name, value in content.items() if name not in KERNELS})


def fields(theirs: Any) -> dict[str, Any]:
    """Convert their config to fields of our LMConfig."""
    only(theirs, "xlstm", embedding_dim=theirs.hidden_size, use_bias=False, weight_mode="single", add_out_norm=True, norm_eps=1e-6)
    mixer = {
        "heads": theirs.num_heads, "key_ratio": theirs.qk_dim_factor, "value_ratio": theirs.v_dim_factor,
        "soft_cap": theirs.gate_soft_cap, "eps": theirs.eps,
    }  # fmt: skip
    multiple = theirs.ffn_round_up_to_multiple_of
    hidden = int((theirs.hidden_size * theirs.ffn_proj_factor + multiple - 1) // multiple * multiple)
    return base(theirs) | {
        "layers": theirs.num_blocks, "mixer": "mlstm", "mixer_options": {"mlstm": mixer}, "ffn_dim": hidden, "norm_eps": theirs.norm_eps,
        "logit_soft_cap": theirs.output_logit_soft_cap, "tie_embeddings": False,
    }  # fmt: skip


def config(ours: LMConfig) -> dict[str, Any]:
    """Convert our LMConfig to fields of their config."""
    mixer, hidden = mixer_of(ours, "mlstm"), ffn_of(ours, "swiglu").up_proj.out_features
    return back(ours) | {
        "num_heads": mixer.heads, "qk_dim_factor": mixer.q_proj.out_features / ours.dim,
        "v_dim_factor": mixer.v_proj.out_features / ours.dim, "gate_soft_cap": mixer.soft_cap, "eps": mixer.eps,
        "norm_eps": ours.norm_eps, "output_logit_soft_cap": ours.logit_soft_cap or 30.0, "tie_word_embeddings": False,
        "ffn_proj_factor": (hidden + 0.5) / ours.dim, "ffn_round_up_to_multiple_of": 1,  # rounded down to whole channels
    }  # fmt: skip


def weights(ours: LMConfig) -> Iterator[Line]:
    """Lines of all weights but embedding and head."""
    yield same("backbone.out_norm.weight", "model.norm.weight")
    for i in range(ours.layers):
        theirs, own = f"backbone.blocks.{i}.", f"model.layers.{i}."
        yield from under(theirs, own, named(_NORMS))
        yield from under(f"{theirs}mlstm_layer.", f"{own}mixer.", MIXER)
        yield from under(f"{theirs}ffn.", f"{own}ffn.", FFN)


FAMILIES = {
    "xlstm": Family(
        "xlstm", "xLSTMForCausalLM", ("backbone.embeddings.weight", "lm_head.weight"), complete, fields, config, weights, ties=False,
    )
}  # fmt: skip
