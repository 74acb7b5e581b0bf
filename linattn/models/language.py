"""Language model: embedding, blocks, head. One backbone serves every mixer; hybrids are patterns in its config."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linattn.mixers.fault import explain_failure
from linattn.models.block import Block, norm
from linattn.models.config import LMConfig
from linattn.models.reversible import through
from linattn.ops import sharding
from linattn.ops.checks import check_tokens, flag
from linattn.state import State


class Backbone(nn.Module):
    """Tokens [B, T] -> hidden states [B, T, D], with a :class:`linattn.State` in and out."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.embedding_norm = norm(config) if config.embedding_norm else None
        blocks = [Block(config, i) for i in range(config.layers)]
        self.layers = nn.ModuleList(blocks)
        self._mixers = config.mixer_names
        self.dim, self.scale = config.dim, config.embedding_scale
        self.reversible = config.block == "reversible"
        self.norm = None if config.block == "post" else norm(config)  # post-norm blocks end in a norm
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # replaced by transformers
        nn.init.normal_(self.embedding.weight, std=0.02)
        for block in blocks:
            _soften(block, config.layers)

    @explain_failure
    def forward(
        self,
        ids: Tensor | None = None,
        state: State | None = None,
        *,
        embeddings: Tensor | None = None,
        return_state: bool = False,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        """Run the stack on ``ids`` [B, T], or on ``embeddings`` [B, T, D] in their place.

        Args:
            state: state returned by an earlier call, whose sequences the tokens continue.
            return_state: return the state after the last token as the second value, which is None otherwise.
            mask: [B, T] bool, True = real token.
            cu_seqlens: [N + 1]: B is 1 and N sequences lie end to end.

        Raises:
            ValueError: for ``ids`` that are not integers [B, T] or, if values can be read, not tokens of the vocabulary, for
                ``embeddings`` of another width, and for a state of another model.
        """
        if state is not None and not isinstance(state, State):
            raise TypeError(f"state must be a linattn.State, as returned by an earlier call, but came as {type(state).__name__}")
        flag("return_state", return_state)
        if state is not None and len(state.layers) != len(self.layers):
            raise ValueError(f"the state has {len(state.layers)} layers, but the model has {len(self.layers)}")
        if embeddings is None:
            check_tokens("ids", ids, self._vocabulary)
        elif embeddings.ndim != 3 or embeddings.shape[-1] != self.dim:
            raise ValueError(f"embeddings must be [B, T, {self.dim}], but came with shape {list(embeddings.shape)}")
        x = self.entered(self.embedding(ids) if embeddings is None else embeddings)
        if self.reversible and state is None and not return_state and self.training and torch.is_grad_enabled():
            return self.joined(through(self.layers, x, mask=mask, cu_seqlens=cu_seqlens)), None
        how = {"return_state": return_state, "mask": mask, "cu_seqlens": cu_seqlens}
        x, states = self.run_layers(range(len(self.layers)), x, state, {}, **how)
        return self.joined(x), State(states) if return_state else None

    def run_layers(
        self, numbers: range, x: Tensor, state: State | None, shared: dict[str, Tensor | None], **how: Any
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Run the layers ``numbers`` on ``x`` [B, T, D]; returns it after them and their states, {} for a layer without one.

        ``shared`` has the tensor passed on by the last layer of each mixer that shares one, and is updated; ``how`` are
        ``return_state``, ``mask`` and ``cu_seqlens`` as in :meth:`forward`.
        """
        states = []
        for i in numbers:
            old, mixer = None if state is None else state.layers[i], self._mixers[i]
            x, new, shared[mixer] = self._run(self.layers[i], x, old, shared.get(mixer), **how)
            states.append(new or {})
        return x, states

    def entered(self, x: Tensor) -> Tensor:
        """Convert ``x``, embeddings [B, T, D], to the input of the first block.

        Under autocast the residual stream has its dtype; streams of reversible blocks, from whose sums inputs are recovered, stay float32.
        """
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype == torch.float32 and not self.reversible:
            x = x.to(torch.get_autocast_dtype(device))
        x = x if self.scale == 1 else x * self.scale
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return torch.cat([x, x], -1) if self.reversible else x  # two equal streams

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    @property
    def _vocabulary(self) -> int:
        """Number of tokens of the embedding, which adapters may have wrapped; a quantised one is not dequantised."""
        count = getattr(self.embedding, "num_embeddings", None)
        return len(self.embedding.weight) if count is None else int(count)

    def joined(self, x: Tensor) -> Tensor:
        """Convert the last block's output to hidden states [B, T, D]."""
        x = x.unflatten(-1, (2, -1)).mean(-2) if self.reversible else x
        return x if self.norm is None else self.norm(x)

    def _run(
        self, layer: nn.Module, x: Tensor, old: dict[str, Tensor] | None, shared: Tensor | None, **how: Any
    ) -> tuple[Tensor, dict[str, Tensor] | None, Tensor | None]:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(
                sharding.bound(partial(layer, **how)), x, old, shared
            )  # reentrant checkpoints do not pass keywords on
        return layer(x, old, shared, **how)


class LanguageModel(nn.Module):
    """Language model ``model(ids)`` -> logits, which needs only torch. :mod:`linattn.hf` has the same model for transformers."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = head(self.model, config)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.model.device

    def forward(
        self,
        ids: Tensor,
        state: State | None = None,
        *,
        return_state: bool = False,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        """Compute logits [B, T, vocab] of the token after each of ``ids`` [B, T]; the pair (logits, state) with ``return_state``.

        ``state`` continues an earlier call, ``mask`` [B, T] bool marks real tokens, ``cu_seqlens`` [N + 1] packs N sequences.
        """
        hidden, state = self.model(ids, state, return_state=return_state, mask=mask, cu_seqlens=cu_seqlens)
        logits = self.lm_head(hidden)
        return (logits, state) if return_state else logits


class Head(nn.Linear):
    """Output layer [.., D] -> logits [.., vocab], with the soft cap of the config."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config.dim, config.vocab_size, bias=False)
        self.soft_cap = config.logit_soft_cap

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


def head(model: Backbone, config: LMConfig) -> nn.Linear:
    """Create the output layer of ``model``, tied to its embedding if the config says so."""
    linear = Head(config)
    nn.init.normal_(linear.weight, std=0.02)
    if config.tie_embeddings:
        linear.weight = model.embedding.weight
    return linear


@torch.no_grad()
def _soften(block: Block, layers: int) -> None:
    """Scale the initial weights that write to the residual stream by 1/√(2·layers), so that its variance does not grow with depth."""
    for branch, name in ((block.mixer, "o_proj"), (block.ffn, "down_proj")):
        out = getattr(branch, name, None)
        weight = out.weight if isinstance(out, nn.Linear) else out
        if isinstance(weight, nn.Parameter):
            weight.mul_((2 * layers) ** -0.5)
