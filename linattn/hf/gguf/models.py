"""Models of GGUF files in transformers' format: the equivalent ``config.json``, and the weights under transformers' names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linattn.hf.config import LMConfig
from linattn.hf.folder import Weights
from linattn.hf.gguf import own, ssm
from linattn.hf.gguf.file import GGUFFile
from linattn.models.memory import require

_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
          "post_ffw_norm": "post_feedforward_layernorm"}  # fmt: skip
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
FREQUENCIES = "rope_freqs.weight"  # divisors of the rotary frequencies, which follow from the config
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # the values of all Llama 3 models


@dataclass(frozen=True)
class _Architecture:
    """Model type of transformers, names of a block's tensors there, and how tensors and config differ from it.

    ``permuted``: the rows of queries and keys are interleaved pairs. ``centred``: norms have 1 added to their weight.
    """

    model_type: str
    block: dict[str, str] = field(default_factory=lambda: _BLOCK)
    permuted: bool = False
    centred: bool = False


ARCHITECTURES = {
    "llama": _Architecture("llama", permuted=True),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "gemma3": _Architecture("gemma3_text", block=_BLOCK | _GEMMA, centred=True),
}


class _Metadata:
    """Values of a file's metadata, those of its architecture by their short names."""

    def __init__(self, file: GGUFFile) -> None:
        self._values, name = file.metadata, file.metadata.get("general.architecture")
        known = (*ARCHITECTURES, *ssm.NAMES, *own.CONFIGS)
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"general.architecture must be one of {', '.join(known)} to be read, but is {name!r}")
        self.architecture = name

    def get(self, name: str, default: Any = None) -> Any:
        """Value of a key of the architecture: a number, or a text."""
        return self.value(f"{self.architecture}.{name}", default)

    def value(self, key: str, default: Any = None) -> Any:
        """Value of a key; the shortest decimal of a float32."""
        value = self._values.get(key, default)
        if isinstance(value, list):
            raise ValueError(f"{key} must be one value for all layers to be read, but is a list")
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def layers(self, name: str, count: int) -> list[int]:
        """Value of a key of the architecture for each of ``count`` layers."""
        values = self._values.get(f"{self.architecture}.{name}")
        if not isinstance(values, list) or len(values) != count or not all(isinstance(value, int) for value in values):
            raise ValueError(f"{self.architecture}.{name} must be a list of {count} integers, but is {values!r}")
        return values

    def number(self, name: str, default: float | None = None) -> float:
        """Value of a key of the architecture, above 0; it is required if there is no default."""
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{self.architecture}.{name} must be a number above 0, but is {value!r}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Value of a key that counts something."""
        value = self.number(name, default)
        if not isinstance(value, int):
            raise ValueError(f"{self.architecture}.{name} must be an integer, but is {value!r}")
        return value


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Content of the ``config.json`` of the model in ``file``.

    Raises:
        ValueError: for an architecture or an option that is not read, and for metadata that is missing.
    """
    metadata = _Metadata(file)
    if metadata.architecture in own.CONFIGS:
        return _own(metadata, file)
    if metadata.get("expert_count", 0):
        raise ValueError(f"{metadata.architecture}.expert_count must be 0 to be read, but is {metadata.get('expert_count')}")
    every = {
        "vocab_size": _vocabulary(file), "hidden_size": metadata.count("embedding_length"),
        "num_hidden_layers": metadata.count("block_count"), "tie_word_embeddings": "output.weight" not in file.tensors,
        **_special(metadata),
    }  # fmt: skip
    return every | (ssm.config(metadata) if metadata.architecture in ssm.NAMES else _attention(metadata, file))


def _own(metadata: _Metadata, file: GGUFFile) -> dict[str, Any]:
    """Content of the ``config.json`` of a model of this library."""
    every = {
        "vocab_size": _vocabulary(file),
        "dim": metadata.count("embedding_length"),
        "tie_embeddings": "output.weight" not in file.tensors,
    }
    return {"model_type": LMConfig.model_type, **every, **_special(metadata), **own.CONFIGS[metadata.architecture](metadata)}


def _vocabulary(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ValueError("there is no tensor token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _special(metadata: _Metadata) -> dict[str, Any]:
    return {name: metadata.value(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in _TOKENS.items()}


def _attention(metadata: _Metadata, file: GGUFFile) -> dict[str, Any]:
    """Fields of the config of a Transformer."""
    heads = metadata.count("attention.head_count")
    size = metadata.count("attention.key_length", metadata.count("embedding_length") // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if metadata.get(name, size) != size:
            raise ValueError(f"{metadata.architecture}.{name} must be that of a head, {size}, to be read, but is {metadata.get(name)}")
    return {
        "model_type": ARCHITECTURES[metadata.architecture].model_type, "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads), "head_dim": size,
        "intermediate_size": metadata.count("feed_forward_length"), "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.count("context_length"), "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        **_positions(metadata, file),
    }  # fmt: skip


_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _positions(metadata: _Metadata, file: GGUFFile) -> dict[str, Any]:
    """Rotary positions, and windows and scales of Gemma, as fields of the config."""
    rope = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10000.0)} | _scaling(metadata, file)
    if metadata.architecture != "gemma3":
        return {"rope_parameters": rope}
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10000.0)}
    layers, period = metadata.count("block_count"), metadata.count("attention.sliding_window_pattern", 6)
    size = metadata.count("attention.key_length")
    return {
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
        "layer_types": ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)],
        "sliding_window": metadata.count("attention.sliding_window"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        # Not in the files. Of all published sizes only that of 62 layers differs from the size of a head.
        "query_pre_attn_scalar": metadata.count("embedding_length") // metadata.count("attention.head_count") if layers == 62 else size,
    }


def _scaling(metadata: _Metadata, file: GGUFFile) -> dict[str, Any]:
    """Scaling of the rotary frequencies, in transformers' terms."""
    if FREQUENCIES in file.tensors:
        return _llama3(file.tensor(FREQUENCIES).double(), metadata)
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{metadata.architecture}.rope.scaling.type must be none, linear or yarn to be read, but is {kind!r}")
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.count("rope.scaling.original_context_length")
    return scaling


def _llama3(divisors: Tensor, metadata: _Metadata) -> dict[str, Any]:
    """Llama 3's scaling whose frequencies are the plain ones over ``divisors`` [K / 2]."""
    from linattn.mixers.rotary import frequencies

    scaling = {"rope_type": "llama3", "factor": round(divisors.max().item(), 4), **_LLAMA3}
    base, rotated = metadata.number("rope.freq_base", 10000.0), 2 * len(divisors)
    plain, scaled = (frequencies(divisors, rotated, base, how) for how in (None, scaling))
    if not torch.allclose(plain / divisors, scaled, rtol=1e-4, atol=0):  # the file's divisors were computed in float32
        raise ValueError(f"{FREQUENCIES} must be those of Llama 3 ({_LLAMA3}) to be read")
    return scaling


class _GGUFWeights(Weights):
    """Weights of a GGUF file under transformers' names."""

    def __init__(self, file: GGUFFile) -> None:
        metadata = _Metadata(file)
        self._architecture = ARCHITECTURES[metadata.architecture]
        self._heads = {
            "q": metadata.count("attention.head_count"),
            "k": metadata.count("attention.head_count_kv", metadata.count("attention.head_count")),
        }
        names = [name for name in file.tensors if name != FREQUENCIES]
        self._where = {_named(name, self._architecture.block): (file, name) for name in names}

    def shape(self, name: str) -> tuple[int, ...]:
        file, there = self._where[name]
        return file.tensors[there].shape

    def __getitem__(self, name: str) -> Tensor:
        file, there = self._where[name]
        t: Tensor = file.tensor(there)
        if self._architecture.centred and "norm" in there:
            return t - 1
        found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", there) if self._architecture.permuted else None
        if found is None:
            return t
        return t.unflatten(0, (self._heads[found[1]], -1, 2)).transpose(1, 2).flatten(0, 2)  # interleaved pairs -> two halves


class _SSMWeights(Weights):
    """Weights of a Mamba or a Mamba-2 under transformers' names."""

    def __init__(self, file: GGUFFile) -> None:
        self._architecture = _Metadata(file).architecture
        self._where = {ssm.named(name, self._architecture): (file, name) for name in file.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        file, there = self._where[name]
        return ssm.shape(name, file.tensors[there].shape, self._architecture)

    def __getitem__(self, name: str) -> Tensor:
        file, there = self._where[name]
        return ssm.value(name, file.tensor(there), self._architecture)


def weights_of(file: GGUFFile) -> Weights:
    """Weights of ``file`` under the names of the model in :func:`config_of`.

    Raises:
        ValueError: if they need more memory as floats than there is.
    """
    require(file.floats(), f"the weights in {file.path}")
    metadata = _Metadata(file)
    if metadata.architecture in own.CONFIGS:
        return own.OwnWeights(file, metadata.architecture, LMConfig.from_dict(_own(metadata, file)))
    return _SSMWeights(file) if metadata.architecture in ssm.NAMES else _GGUFWeights(file)


def _named(name: str, block: dict[str, str]) -> str:
    """Name of a tensor in transformers; an unknown one keeps its own."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        return f"model.layers.{found[1]}.{block[found[2]]}.{found[3]}" if found[2] in block else name
    part, _, kind = name.rpartition(".")
    return f"{_ENDS[part]}.{kind}" if part in _ENDS else name
