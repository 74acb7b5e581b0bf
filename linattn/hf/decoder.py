"""Backbone with the keywords of transformers' models, and their translation to the backbone's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from linattn.hf.cache import CACHE, StateCache, keyword, pop_cache
from linattn.hf.config import LMConfig
from linattn.hf.packing import Packing, positions, sequences
from linattn.models import Backbone
from linattn.ops import sharding
from linattn.ops.checks import dtype, shape, tensor, values_visible


@dataclass(frozen=True)
class Call:
    """Tokens of one call, in transformers' terms."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    mask: Tensor | None  # [B, T] bool, True for real tokens; None: all are
    cache: StateCache | None
    use_cache: bool
    cu_seqlens: Tensor | None  # [N + 1] of all rows concatenated; None: not packed
    output_hidden_states: bool

    @property
    def shape(self) -> torch.Size:
        """B and T."""
        return _tokens(self.input_ids, self.inputs_embeds).shape[:2]

    def labels(self, labels: Tensor | None, logits_to_keep: int | Tensor) -> Tensor | None:
        """Mask in ``labels`` [B, T] the first tokens of packed sequences, which do not follow from the tokens before."""
        if labels is None:
            return None
        if sharding.active() is not None:
            raise ValueError("labels cannot be given under context_parallel, which splits rows: use linattn.parallel.token_loss")
        shape("labels", tensor("labels", labels), "[B, T]", tuple(self.shape))
        dtype("labels", labels, torch.int64)
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            came = "indices" if isinstance(logits_to_keep, Tensor) else logits_to_keep
            raise ValueError(f"logits_to_keep must be 0 with labels, which need the logits of every token, but is {came}")
        if self.cu_seqlens is None:
            return labels
        first = positions(self.cu_seqlens, labels.numel()) == 0
        return labels.masked_fill(first.view(labels.shape).to(labels.device), -100)


def _tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Tokens [B, T] or embeddings [B, T, D]."""
    given = input_ids if inputs_embeds is None else inputs_embeds
    if given is None or (input_ids is not None) == (inputs_embeds is not None):
        raise ValueError("give either input_ids [B, T] or inputs_embeds [B, T, D]")
    name, wanted = ("input_ids", "[B, T]") if inputs_embeds is None else ("inputs_embeds", "[B, T, D]")
    if tensor(name, given).ndim != wanted.count(",") + 1:
        raise ValueError(f"{name} must have shape {wanted}, but came with {list(given.shape)}")
    if inputs_embeds is None:
        dtype(name, given, torch.int64, torch.int32)
    return given


def _real(mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Mask [B, T] bool of this call's own tokens (earlier ones are in the state); None if all are known to be real."""
    if mask is None:
        return None
    rows, length = tokens.shape[:2]
    if tensor("attention_mask", mask).ndim != 2 or mask.shape[0] != rows or mask.shape[1] < length:
        wanted = f"[B, T], 1 for real tokens, with B = {rows} and T at least {length}"
        raise ValueError(f"attention_mask must have shape {wanted}, but came with {list(mask.shape)}")
    mask = mask[:, mask.shape[1] - length :].bool()
    return None if values_visible(mask) and bool(mask.all()) else mask


class Answers:
    """Base with a forward pass in transformers' keywords, for models around a backbone and for the backbone itself."""

    config: LMConfig
    training: bool

    @property
    def _backbone(self) -> Backbone:
        """Embedding, blocks and last norm."""
        raise NotImplementedError

    def answer(  # noqa: PLR0913  transformers' generate() and Trainer look these names up in the signature
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        cache: StateCache | None = None,
        **packing: Unpack[Packing],
    ) -> BaseModelOutputWithPast | tuple:
        """Tokens [B, T] -> ``last_hidden_state`` [B, T, D]. Arguments as in :meth:`LinattnForCausalLM.forward`."""
        asked = self._call(
            input_ids, inputs_embeds, attention_mask, {"past_key_values": past_key_values, "cache": cache}, use_cache=use_cache,
            output_hidden_states=output_hidden_states, output_attentions=output_attentions, position_ids=position_ids,
            cu_seqlens=cu_seqlens, given=packing,
        )  # fmt: skip
        hidden, state, between = self._hidden(asked)
        return self._out(BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=between, **keyword(state)), return_dict)

    def _call(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        caches: dict[str, StateCache | None],
        *,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
        **packed: Any,
    ) -> Call:
        """Arguments of a call, with the config's values in place of None; the cache under one of its names.

        ``packed`` are arguments of :func:`linattn.hf.packing.sequences`.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions must not be True; linattn.mixing_matrix computes the weights of one mixer")
        tokens, cache = _tokens(input_ids, inputs_embeds), pop_cache(caches)
        if cache is not None and not isinstance(cache, StateCache):
            raise TypeError(f"{CACHE} must be a linattn.hf.StateCache, but came as {type(cache).__name__}")
        mask = _real(attention_mask, tokens)
        said_by, cu_seqlens = sequences(tokens, mask=mask, fresh=cache is None or cache.state is None, **packed)
        mask = None if cu_seqlens is not None and said_by == "position_ids" else mask  # such rows have no padding
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        recording = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return Call(input_ids, inputs_embeds, mask, cache, use_cache, cu_seqlens, bool(recording))

    def _out(self, out: Any, return_dict: bool | None) -> Any:
        """Return ``out``, or its tuple if the call or the config asks for one."""
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()

    def _hidden(self, call: Call) -> tuple[Tensor, StateCache | None, tuple[Tensor, ...] | None]:
        (rows, tokens), cache = call.shape, call.cache
        if cache is None and call.use_cache:
            cache = StateCache()
        self._check_checkpointing(cache)
        rows = 1 if call.cu_seqlens is None else rows
        with _recorded(self._backbone) if call.output_hidden_states else nullcontext() as between:
            hidden, state = self._backbone(
                _end_to_end(call.input_ids, rows),
                None if cache is None else cache.state,
                embeddings=_end_to_end(call.inputs_embeds, rows),
                return_state=cache is not None,
                mask=call.mask,
                cu_seqlens=call.cu_seqlens,
            )
        if cache is not None:
            cache.state, cache.seen = state, cache.seen + tokens
        if rows > 1:
            hidden, between = hidden.unflatten(1, (rows, tokens))[0], between and [x.unflatten(1, (rows, tokens))[0] for x in between]
        return hidden, cache, None if between is None else (*between, hidden)

    def _check_checkpointing(self, cache: StateCache | None) -> None:
        """Raise ValueError for outputs that reentrant checkpointing would detach: it records only a layer's output."""
        if not (self._backbone.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return
        if not getattr(self._backbone._gradient_checkpointing_func, "keywords", {}).get("use_reentrant", True):
            return
        if cache is not None or any(getattr(layer.ffn, "adds_loss", False) for layer in self._backbone.layers):
            lost = "the state that use_cache=True asks for" if cache is not None else f"the losses of ffn {self.config.ffn!r}"
            raise ValueError(f"use_reentrant of gradient checkpointing must be False: with True {lost} would have no gradient")


class Decoder(Answers, Backbone):
    """Backbone within a model of transformers; with ``input_ids=`` or ``inputs_embeds=`` it behaves as ``AutoModel``.

    Called by TRL's trainers, for example, which compute logits themselves.
    """

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config)
        self.config = config

    @property
    def _backbone(self) -> Backbone:
        return self

    def forward(self, ids: Tensor | None = None, state: Any = None, **asked: Any) -> Any:
        """Run as :class:`linattn.models.Backbone`, or with ``input_ids=`` or ``inputs_embeds=`` as :class:`LinattnModel`."""
        if ids is None and not asked.keys().isdisjoint(("input_ids", "inputs_embeds")):
            return self.answer(**asked)
        return super().forward(ids, state, **asked)


def _end_to_end(t: Tensor | None, rows: int) -> Tensor | None:
    """Concatenate all ``rows`` of t [B, T, ...] into one, if there are several."""
    return t if t is None or rows == 1 else t.flatten(0, 1)[None]


@contextmanager
def _recorded(model: Backbone) -> Iterator[list[Tensor]]:
    """Record the input [B, T, D] of each layer of ``model`` in a list, within the context."""
    into: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: into.append(args[0])) for layer in model.layers]
    try:
        yield into
    finally:
        for hook in hooks:
            hook.remove()
