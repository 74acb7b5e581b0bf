"""Tiny models of the patchable families, and calls of them."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor

from linattn.hf.cache import name_of_cache

VOCABULARY, TOKENS, SHORT = 60, 37, 23
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,  # large enough that every part shows in the logits
}  # fmt: skip
_ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_DELTA: dict[str, Any] = _ATTENTION | {
    "layer_types": _MIXED, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA | _EXPERTS | {"head_dim": 16},
    "qwen3_5_text": _DELTA | {"head_dim": 16},
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"head_dim": 16},
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "kimi_linear": _ATTENTION | {
        "layer_types": _MIXED, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "kv_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 10, "qk_nope_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 3,
        "n_shared_experts": 2,
    },
    "mamba": {"state_size": 8, "use_bias": True},
    "falcon_mamba": {"state_size": 8, "tie_word_embeddings": False},
    "jamba": _ATTENTION | {
        "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 3, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16, "time_step_limit": (0.02, 0.5)},
    "bamba": _ATTENTION | _MAMBA2 | {"attn_layer_indices": [1]},
    "zamba2": _ATTENTION | {
        "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_headdim": 16, "mamba_ngroups": 2, "n_mamba_heads": 4, "mamba_expand": 2,
        "chunk_size": 16, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba"], "add_bias_linear": False,
        "time_step_min": 0.05,
    },
    "nemotron_h": _ATTENTION | {
        "layers_block_type": ["mamba", "attention", "mamba"], "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "chunk_size": 16, "head_dim": 8, "time_step_min": 0.05,
    },
    "granitemoehybrid": _ATTENTION | _MAMBA2 | {
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 24,
        "embedding_multiplier": 1.0,
    },
    "rwkv": {"intermediate_size": 48, "rescale_every": 2},
}  # fmt: skip
PURE = ("rwkv", "mamba", "falcon_mamba", "mamba2")  # families without softmax attention
Model = Any


def model_of(name: str, **changes: Any) -> Model:
    """A model of transformers with random weights, float32, in evaluation."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(name, **_SMALL | MODELS[name] | changes)
    config._experts_implementation = "eager"  # the other ones refuse float64
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter, t in model.named_parameters():
            if parameter.endswith(("time_decay", "time_first")):
                t.uniform_(-2, 0)
            if parameter.endswith(("in_proj.bias", "conv1d.bias")):
                t.normal_(0, 0.3)
    return model


shared_model = functools.cache(model_of)


def distance(got: Tensor, wanted: Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


@torch.no_grad()
def logits_of(model: Model, ids: Tensor, **options: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **options).logits


class Decoder:
    """A model and its cache, called with one piece after the other; positions and masks as ``generate`` gives them."""

    def __init__(self, model: Model) -> None:
        kind = model.config.model_type
        self.model, self.name = model, "state" if kind == "rwkv" else name_of_cache(model.forward)
        self.softmax = kind not in PURE  # layers that need the mask and the positions of all tokens
        self.given: dict[str, Any] = {}
        self.mask: Tensor | None = None

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        mask = torch.ones_like(ids) if mask is None else mask
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], 1)
        options: dict[str, Any] = {}
        if self.softmax:
            options["position_ids"] = (self.mask.cumsum(1) - 1).masked_fill(self.mask == 0, 0)[:, -ids.shape[1] :]
        if ids.shape[1] > 1 or self.softmax:
            options["attention_mask"] = self.mask if self.softmax else mask
        out = self.model(input_ids=ids, use_cache=True, **self.given, **options, **more)
        self.given = {self.name: out[self.name]}
        return out.logits


def recurrent_states(cache: Any) -> list[Tensor]:
    """All recurrent states in a cache."""
    if isinstance(cache, list):
        return cache[2:]
    layers = [getattr(layer, "recurrent_states", {}) for layer in cache.layers]
    return [states[0] for states in layers if states.get(0) is not None]


def same_states(one: Decoder, other: Decoder) -> bool:
    """True if their first layers have equal states; later ones follow attention, whose masks ignore packing with a cache."""

    def states(cache: Any) -> list[Tensor]:
        if isinstance(cache, list):
            return [t[..., 0] for t in cache[1:]]
        return [cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]]

    pairs = zip(*(states(decoder.given[decoder.name]) for decoder in (one, other)), strict=True)
    return all(distance(got, wanted) < 1e-5 for got, wanted in pairs)


def pieces(model: Model, ids: Tensor) -> Tensor:
    """Logits of ``ids`` read as a prompt, a second one, and token by token."""
    decode, cuts = Decoder(model), [0, 11, 30, *range(31, TOKENS + 1)]
    return torch.cat([decode(ids[:, a:b]) for a, b in zip(cuts, cuts[1:], strict=False)], 1)


def padded(ids: Tensor, length: int, side: str) -> tuple[Tensor, Tensor]:
    """``ids`` and their mask, where the second row is only its first ``length`` tokens."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    gap = ids.shape[1] - length
    ids[1] = torch.cat([ids[1, :length], ids.new_zeros(gap)]).roll(gap if side == "left" else 0)
    mask[1] = (ids[1] != 0).long()
    return ids, mask


def packings() -> dict[str, dict[str, Tensor | int]]:
    """Arguments that mark one row of TOKENS as two sequences, the first of SHORT tokens."""
    rest = TOKENS - SHORT
    positions = torch.cat([torch.arange(SHORT), torch.arange(rest)])[None]
    ends = torch.tensor([0, SHORT, TOKENS], dtype=torch.int32)
    return {
        "cu_seq_lens": {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": SHORT, "max_length_k": SHORT},
        "cu_seq_lens_k": {"cu_seq_lens_k": ends},
        "cu_seqlens": {"cu_seqlens": ends},  # as linattn and fla call it
        "seq_idx": {"seq_idx": torch.tensor([[0] * SHORT + [1] * rest], dtype=torch.int32)},
        "position_ids": {"position_ids": positions},
    }


def everything(module: ModuleType) -> dict[tuple[str, ...], Any]:
    """Snapshot of every global of a module and every attribute of its classes."""
    found: dict[tuple[str, ...], Any] = {(name,): value for name, value in vars(module).items()}
    for name, owner in vars(module).items():
        if isinstance(owner, type):
            found |= {(name, attribute): value for attribute, value in vars(owner).items()}
    return found


def gradients_of(model: Model, ids: Tensor, **options: Any) -> dict[str, Tensor]:
    """Of a sum of the logits with fixed random weights."""
    torch.manual_seed(2)
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, **options).logits
    (logits * torch.randn_like(logits)).sum().backward()
    return {name: t.grad.clone() for name, t in model.named_parameters() if t.grad is not None}
