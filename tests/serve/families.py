"""Small new models of published families that vLLM lacks, made from their configs."""

from typing import Any

import torch

from linattn.hf import LinattnForCausalLM, load

COMMON: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "eos_token_id": 2}
OWN: dict[str, dict[str, Any]] = {
    "rwkv": {},
    "rwkv6": {"num_heads": 2, "expand_k": 1.0, "expand_v": 1.0},
    "rwkv7": {"head_dim": 32},
    "xlstm": {"num_heads": 2},
    "recurrent_gemma": {
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128,
        "lru_width": 64, "attention_window_size": 16,
    },
    "gla": {"num_heads": 2},
    "retnet": {"num_heads": 2},
    "delta_net": {"num_heads": 2},
    "gated_deltanet": {"num_heads": 2, "head_dim": 32},
    "kda": {"num_heads": 2, "head_dim": 32},
    "hgrn2": {"expand_ratio": 32},
}  # fmt: skip


def small(model_type: str) -> LinattnForCausalLM:
    """New model of a family, its weights away from ones and zeros."""
    torch.manual_seed(0)
    model = load({"model_type": model_type, **COMMON, **OWN[model_type]})
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.1 * torch.randn_like(p))
    return model
