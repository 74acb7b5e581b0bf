"""The language model: embedding, blocks, head. One backbone for every mixer; hybrids are a pattern of its config."""

from __future__ import annotations

from functools import partial

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
        self.norm = None if config.block == "post" else norm(config)  # after-norm blocks end in one
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # transformers puts its own here
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
            state: what an earlier call returned: the tokens continue that one's sequences.
            return_state: whether the second value is the state after the last token; None otherwise.
            mask: [B, T] bool, True = real token.
            cu_seqlens: [N + 1]: B is 1 and N sequences lie end to end.

        Raises:
            ValueError: for ``ids`` that are no integers [B, T] or, where they may be looked at, no tokens of the vocabulary, for
                ``embeddings`` of another width, and for a state of another model.
        """
        if state is not None and not isinstance(state, State):
            raise TypeError(f"state must be a linattn.State, as an earlier call returned it, but came as {type(state).__name__}")
        flag("return_state", return_state)
        if state is not None and len(state.layers) != len(self.layers):
            raise ValueError(f"the state has {len(state.layers)} layers, but the model has {len(self.layers)}")
        if embeddings is None:
            check_tokens("ids", ids, len(self.embedding.weight))
        elif embeddings.ndim != 3 or embeddings.shape[-1] != self.dim:
            raise ValueError(f"embeddings must be [B, T, {self.dim}], but came with shape {list(embeddings.shape)}")
        x = self.embedding(ids) if embeddings is None else embeddings
        x = x if self.scale == 1 else x * self.scale
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        if self.reversible:
            x = torch.cat([x, x], -1)  # two streams that start alike
            if state is None and not return_state and self.training and torch.is_grad_enabled():
                return self._joined(through(self.layers, x, mask=mask, cu_seqlens=cu_seqlens)), None
        states = []
        shared: dict[str, Tensor | None] = {}  # for each mixer that does so what its last layer passed on
        for i, (layer, mixer) in enumerate(zip(self.layers, self._mixers, strict=True)):
            old = None if state is None else state.layers[i]
            x, new, shared[mixer] = self._run(layer, x, old, shared.get(mixer), return_state=return_state, mask=mask, cu_seqlens=cu_seqlens)
            states.append(new or {})
        return self._joined(x), State(states) if return_state else None

    def _joined(self, x: Tensor) -> Tensor:
        """The hidden states [B, T, D] of what the last block gave."""
        x = x.unflatten(-1, (2, -1)).mean(-2) if self.reversible else x
        return x if self.norm is None else self.norm(x)

    def _run(
        self, layer: nn.Module, x: Tensor, old: dict[str, Tensor] | None, shared: Tensor | None, **how
    ) -> tuple[Tensor, dict[str, Tensor] | None, Tensor | None]:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(
                sharding.bound(partial(layer, **how)), x, old, shared
            )  # reentrant ones pass no keywords on
        return layer(x, old, shared, **how)


class LanguageModel(nn.Module):
    """``model(ids)`` -> logits; works with nothing but torch. :mod:`linattn.hf` is the same model for transformers."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = head(self.model, config)

    def forward(
        self,
        ids: Tensor,
        state: State | None = None,
        *,
        return_state: bool = False,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        """Logits [B, T, vocab] of the token after each of ``ids`` [B, T]; the pair (logits, state) with ``return_state``.

        ``state`` continues an earlier call, ``mask`` [B, T] bool marks real tokens, ``cu_seqlens`` [N + 1] packs N sequences.
        """
        hidden, state = self.model(ids, state, return_state=return_state, mask=mask, cu_seqlens=cu_seqlens)
        logits = self.lm_head(hidden)
        return (logits, state) if return_state else logits


class Head(nn.Linear):
    """[.., D] -> logits [.., vocab], softly capped if the config says so."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config.dim, config.vocab_size, bias=False)
        self.soft_cap = config.logit_soft_cap

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)


def head(model: Backbone, config: LMConfig) -> nn.Linear:
    """The output layer of ``model``, tied to its embedding if the config says so."""
    linear = Head(config)
    nn.init.normal_(linear.weight, std=0.02)
    if config.tie_embeddings:
        linear.weight = model.embedding.weight
    return linear


@torch.no_grad()
def _soften(block: Block, layers: int) -> None:
    """Scale what enters the residual stream by 1/√(2·layers), so that its variance does not grow with depth at the start."""
    for branch, name in ((block.mixer, "o_proj"), (block.ffn, "down_proj")):
        out = getattr(branch, name, None)
        weight = out.weight if isinstance(out, nn.Linear) else out
        if isinstance(weight, nn.Parameter):
            weight.mul_((2 * layers) ** -0.5)
