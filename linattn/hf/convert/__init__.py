"""Published models, family by family: the map between published and our configs and weights. One file each, registered here.

Names are the ``model_type`` of transformers and of flash-linear-attention. A file is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module

from linattn.arguments import suggestion
from linattn.hf.convert.table import Family as Family

# model_type -> its file
FAMILIES = {
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "rwkv": "rwkv",
    "qwen3_next": "qwen3_next",
    "recurrent_gemma": "recurrent_gemma",
    "minimax": "minimax",
    "xlstm": "xlstm",
    "kimi_linear": "kimi_linear",
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3"), "llama"),
    **dict.fromkeys(("gla", "retnet", "delta_net", "gated_deltanet", "kda", "hgrn2"), "fla"),
    **dict.fromkeys(("rwkv6", "rwkv7"), "fla_rwkv"),
}


def family(model_type: str) -> Family:
    """Family of ``model_type``.

    Raises:
        ValueError: for an unknown name; the message names the closest one, or all.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"no family of models is called {model_type!r}{suggestion(model_type, sorted(FAMILIES))}")
    return import_module(f"linattn.hf.convert.{FAMILIES[model_type]}").FAMILIES[model_type]
