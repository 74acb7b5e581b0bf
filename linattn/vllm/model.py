"""Model classes for vLLM: the backbone of this library with states in vLLM's pages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, IsHybrid, SupportsMambaPrefixCaching

from linattn.hf import load
from linattn.mixers.attention.softmax import Softmax
from linattn.models.language import Backbone, head
from linattn.vllm import states
from linattn.vllm.layers import Attending, Call, Recurrent
from linattn.vllm.layout import after, growing

_MIXER = re.compile(r"^(model\.layers\.\d+\.mixer)\.")


class _Served(nn.Module, HasInnerState, SupportsMambaPrefixCaching):
    """Language model of this library; each mixer reads and writes its states in vLLM's pages."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.config, self._settings = vllm_config.model_config.hf_config, vllm_config.model_config
        self.call = Call()
        self.model, self.lm_head = _built(self.config, self._settings.dtype)
        _wrap(self.model, self.call, vllm_config)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, D] of tokens [T]."""
        return self.model.embedding(input_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, intermediate_tensors: Any = None, inputs_embeds: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Hidden states [T, D] of the tokens of all sequences of a step."""
        self.call.positions = positions
        embeddings = None if inputs_embeds is None else inputs_embeds[None]
        return self.model(None if embeddings is not None else input_ids[None].long(), embeddings=embeddings)[0][0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [N, vocab] of hidden states [N, D]."""
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the folder by :func:`linattn.load`, which converts published names and checks the files; ``weights`` is ignored.

        Raises:
            ValueError: if the model is not a local folder.
        """
        folder = Path(self._settings.model)
        if not folder.is_dir():
            raise ValueError(f"linattn models are served from a folder, but {folder} is not one: hf download --local-dir makes one")
        device = self.model.embedding.weight.device
        loaded = load(folder, dtype=self._settings.dtype, device=device)
        states.begin(loaded)
        for block, start in zip(self.model.layers, after(loaded.model, 0).layers, strict=True):
            if isinstance(block.mixer, Recurrent):
                block.mixer.fresh = start
        own = {_MIXER.sub(r"\1.inner.", name): t for name, t in loaded.state_dict().items()}
        missing, unexpected = self.load_state_dict(own, strict=False, assign=True)
        if lacking := [name for name in missing if ".mixer.attention." not in name] + unexpected:  # vLLM's scales of a quantised cache
            raise ValueError(f"the weights do not fit the model: {', '.join(lacking)}")
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embedding.weight
        self.requires_grad_(False)
        return {name for name, _ in self.named_parameters(remove_duplicate=False)} | set(own)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        """Bytes of a page of states, as :meth:`Recurrent.get_state_shape`."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        return next(layer.get_state_shape() for layer in layers if isinstance(layer, Recurrent))

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        """Dtype of a page of states, as :meth:`Recurrent.get_state_dtype`."""
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """Copy functions of whole pages, for cached prefixes."""
        return MambaStateCopyFuncCalculator.linear_attention_state_copy_func()


class LinattnForCausalLM(_Served, IsAttentionFree):
    """Model whose states are all of constant size."""


class LinattnHybridForCausalLM(_Served, IsHybrid):
    """Model with softmax layers beside others of constant state."""


def _built(config: Any, dtype: torch.dtype) -> tuple[Backbone, nn.Module]:
    """Backbone and head in ``dtype``, time constants in float32; refuses experts whose capacity depends on the other sequences."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        backbone = Backbone(config)
        lm_head = head(backbone, config)
    finally:
        torch.set_default_dtype(default)
    for name, module in backbone.named_modules():
        if getattr(module, "eval_capacity", None) is not None:
            raise ValueError(f"vLLM cannot serve this model: {name} has an eval_capacity, so a token's output depends on other sequences")
    both = nn.ModuleList([backbone, lm_head]).to(dtype).eval()
    return both[0], both[1]  # type: ignore[return-value]


def _wrap(model: Backbone, call: Call, vllm_config: Any) -> None:
    """Replace the mixers of ``model`` by layers of vLLM.

    Raises:
        ValueError: naming a layer whose state grows in another way than softmax's.
    """
    starts, grown = after(model, 0).layers, growing(model)
    for i, block in enumerate(model.layers):
        if i not in grown:
            block.mixer = Recurrent(block.mixer, starts[i], i, call, vllm_config)
        elif type(block.mixer) is Softmax:
            block.mixer = Attending(block.mixer, i, call, vllm_config)
        else:
            raise ValueError(f"vLLM cannot serve this model: the state of layer {i}, {type(block.mixer).__name__}, grows with the tokens")
