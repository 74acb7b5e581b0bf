"""Configs of served models: the fields that vLLM reads, and refusals of models that it cannot serve."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from linattn import mixers
from linattn.hf import LMConfig
from linattn.hf.convert import FAMILIES, family
from linattn.mixers.attention.softmax import Softmax

STATES, HYBRID = "LinattnForCausalLM", "LinattnHybridForCausalLM"  # architectures: only states, and states beside keys and values
UNKNOWN_TO_VLLM = ("rwkv", "rwkv6", "rwkv7", "xlstm", "recurrent_gemma", "gla", "retnet", "delta_net", "gated_deltanet", "kda", "hgrn2")
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # sizes of heads of vLLM's attention; other heads are padded with zeros
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")  # fields kept of a published config


class ServedConfig(LMConfig):
    """Config of a model of this library with the fields that vLLM reads: its architecture, kinds of layers and sizes of heads.

    Raises:
        ValueError: for a model that vLLM cannot serve; the message names its layer.
    """

    model_type: ClassVar[str] = LMConfig.model_type

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make the config from the content of a ``config.json``, also of a published family."""
        if cls.model_type != LMConfig.model_type:
            source = family(cls.model_type)
            kept = {name: config_dict[name] for name in _KEPT if name in config_dict}
            config_dict = kept | source.fields(source.config_of(dict(config_dict)))
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        kinds = [_kind(self, layer) for layer in range(self.layers)]
        heads = {kind for kind in kinds if kind is not None}
        if len(heads) > 1:
            told = " and ".join(f"{count} over {kv} of {size} channels" for count, kv, size in sorted(heads))
            raise ValueError(f"vLLM cannot serve this model: its softmax layers must have equal heads, but have {told}")
        self.architectures = [HYBRID if heads else STATES]
        if heads:
            count, kv_heads, size = heads.pop()
            self.layers_block_type = ["mamba" if kind is None else "attention" for kind in kinds]
            self.num_attention_heads, self.num_key_value_heads, self.head_dim = count, kv_heads, filled(size)


def served_config(model_type: str) -> type[ServedConfig]:
    """Config class of ``model_type``: ours, or one that converts a published family's."""
    if model_type == LMConfig.model_type:
        return ServedConfig
    assert model_type in FAMILIES
    return type(f"Served_{model_type}", (ServedConfig,), {"model_type": model_type, "__module__": __name__})


def filled(size: int) -> int:
    """Size of a head of ``size`` channels in vLLM's cache.

    Raises:
        ValueError: for a size beyond the largest.
    """
    if size > HEAD_SIZES[-1]:
        raise ValueError(f"vLLM cannot serve this model: its softmax heads have {size} channels, at most {HEAD_SIZES[-1]} are supported")
    return next(n for n in HEAD_SIZES if n >= size)


def _kind(config: LMConfig, layer: int) -> tuple[int, int, int] | None:
    """Heads, heads of keys and their size if a layer keeps every token as softmax attention does; None if its state is constant."""
    name = config.mixer_names[layer]
    known, options = mixers.info(name), config.options_of(layer)
    if not known.resumable:
        raise ValueError(f"vLLM cannot serve this model: {name} cannot be continued from a state")
    if known.recurrent:
        return None
    with torch.device("meta"):
        mixer = mixers.create(name, dim=config.dim, **options)
    if type(mixer) is Softmax and mixer.window is not None:
        return None
    if type(mixer) is not Softmax:
        raise ValueError(f"vLLM cannot serve this model: the state of {name} grows with the tokens, and only softmax's is kept in pages")
    if mixer.short_conv is not None:
        raise ValueError("vLLM cannot serve this model: its softmax layers have a short convolution (conv_width) beside their cache")
    return mixer.heads, mixer.kv_heads, mixer.size
