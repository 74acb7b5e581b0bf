"""Language backbone as transformers models; every parameter has the name it has in :class:`linattn.LanguageModel`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from linattn.ffn import added_loss, report, reports
from linattn.hf import card
from linattn.hf.cache import StateCache
from linattn.hf.config import LMConfig
from linattn.hf.generation import StateGenerationMixin
from linattn.hf.packing import Packing, positions, sequences
from linattn.mixers import Mixer
from linattn.models import Backbone
from linattn.models.language import Head, head
from linattn.ops import sharding
from linattn.ops.checks import dtype, shape, tensor, values_visible


@dataclass(frozen=True)
class Call:
    """Tokens of one call, in transformers' terms."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    mask: Tensor | None  # [B, T] bool, True for real tokens; None: all are
    past_key_values: StateCache | None
    use_cache: bool
    cu_seqlens: Tensor | None  # [N + 1] of all rows put end to end; None: nothing is packed
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
            raise ValueError("labels are shifted here, beyond the cut too, under context_parallel: use linattn.parallel.token_loss")
        shape("labels", tensor("labels", labels), "[B, T]", tuple(self.shape))
        dtype("labels", labels, torch.int64)
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            came = "indices" if isinstance(logits_to_keep, Tensor) else logits_to_keep
            raise ValueError(f"labels want the logits of every token, so logits_to_keep must be 0 beside them, but is {came}")
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


class LinattnPreTrainedModel(PreTrainedModel):
    """Base of both classes: the backbone, its initialisation, cache and precision."""

    config_class = LMConfig
    config: LMConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_context_parallel = False  # torch's own, which carries no state; linattn.parallel.context_parallel does
    accepts_loss_kwargs = True
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012  (as the base class declares it)

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config)
        self.model = Backbone(config)
        mixers = [(place, m) for place, m in self.named_modules() if isinstance(m, Mixer)]
        # searched for as regular expressions, so whole: another part may have a weight of that name, or with that in its name
        self._keep_in_fp32_modules_strict = [rf"^{place}\.{name}$" for place, m in mixers for name in m.keep_float32]
        self._hollow = self.model.embedding.weight.is_meta  # from_pretrained builds without memory, then fills

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise parameters that a checkpoint lacks from a new model; construction has initialised the others."""
        if not self._hollow:
            return
        tensors = itertools.chain(self.named_parameters(), self.named_buffers())
        lacking = {n: t for n, t in tensors if not t.is_meta and not getattr(t, "_is_hf_initialized", False)}
        if lacking:
            new = type(self)(self.config)
            for name, tensor in lacking.items():
                tensor.copy_(new.get_parameter(name) if isinstance(tensor, nn.Parameter) else new.get_buffer(name))

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as transformers does, from safetensors files alone: a pickle can run code when it is read."""
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors must be True: a pickle can run code when it is read, and none is")
        return super().from_pretrained(*args, **{**kwargs, "use_safetensors": True})

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, with a model card beside the weights if there is none yet."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            card.write(self, save_directory)

    def _call(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: StateCache | None,
        *,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
        **packed: Any,
    ) -> Call:
        """Arguments of a call, with the config's values in place of None; ``packed`` as for :func:`linattn.hf.packing.sequences`."""
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions: no weights are ever formed here; linattn.mixing_matrix computes those of one mixer")
        tokens, cache = _tokens(input_ids, inputs_embeds), past_key_values
        if cache is not None and not isinstance(cache, StateCache):
            raise TypeError(f"past_key_values must be a linattn.hf.StateCache, but came as {type(cache).__name__}")
        mask = _real(attention_mask, tokens)
        said_by, cu_seqlens = sequences(tokens, mask=mask, fresh=cache is None or cache.state is None, **packed)
        mask = None if cu_seqlens is not None and said_by == "position_ids" else mask  # which has then no padding
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        recording = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return Call(input_ids, inputs_embeds, mask, cache, use_cache, cu_seqlens, bool(recording))

    def _out(self, out: Any, return_dict: bool | None) -> Any:
        """Return ``out``, or its tuple if the call or the config asks for one."""
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()

    def _hidden(self, call: Call) -> tuple[Tensor, StateCache | None, tuple[Tensor, ...] | None]:
        (rows, tokens), cache = call.shape, call.past_key_values
        if cache is None and call.use_cache:
            cache = StateCache()
        self._check_checkpointing(cache)
        rows = 1 if call.cu_seqlens is None else rows
        with _recorded(self.model) if call.output_hidden_states else nullcontext() as between:
            hidden, state = self.model(
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
        """Raise ValueError for outputs that reentrant checkpointing would cut off from the gradient: it records a layer's output alone."""
        if not (self.model.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return
        if not getattr(self.model._gradient_checkpointing_func, "keywords", {}).get("use_reentrant", True):
            return
        if cache is not None or any(getattr(layer.ffn, "adds_loss", False) for layer in self.model.layers):
            lost = "the state that use_cache=True asks for" if cache is not None else f"the losses of ffn {self.config.ffn!r}"
            raise ValueError(f"use_reentrant of gradient checkpointing must be False: with True {lost} would have no gradient")


def _kept(logits_to_keep: int | Tensor) -> slice | Tensor | None:
    """Positions that get logits; None: all."""
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise ValueError(f"logits_to_keep must be at least 0, or indices, but came as {logits_to_keep!r}")
    return slice(-logits_to_keep, None) if logits_to_keep else None


def _end_to_end(t: Tensor | None, rows: int) -> Tensor | None:
    """Concatenate all ``rows`` of t [B, T, ...] into one, if there are several."""
    return t if t is None or rows == 1 else t.flatten(0, 1)[None]


def _weight(labels: Tensor, items: Tensor | int | None) -> Tensor | float:
    """Share of this batch in the ``items`` by which the losses of several batches are divided: 1 for a batch on its own."""
    return 1.0 if items is None else (labels[:, 1:] != -100).sum() / items


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


class LinattnModel(LinattnPreTrainedModel):
    """Hidden states: ``AutoModel``."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config)
        self.post_init()

    def forward(  # as many arguments as transformers passes by name: its generate() and Trainer look them up in the signature
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
        **packing: Unpack[Packing],
    ) -> BaseModelOutputWithPast | tuple:
        """Tokens [B, T] -> ``last_hidden_state`` [B, T, D]. Arguments as in :meth:`LinattnForCausalLM.forward`."""
        asked = self._call(
            input_ids, inputs_embeds, attention_mask, past_key_values, use_cache=use_cache, output_hidden_states=output_hidden_states,
            output_attentions=output_attentions, position_ids=position_ids, cu_seqlens=cu_seqlens, given=packing,
        )  # fmt: skip
        hidden, cache, between = self._hidden(asked)
        out = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache, hidden_states=between)
        return self._out(out, return_dict)


class LinattnForCausalLM(LinattnPreTrainedModel, StateGenerationMixin):
    """Next-token logits, loss and ``generate()``: ``AutoModelForCausalLM``."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config)
        self.vocab_size = config.vocab_size
        self.lm_head = head(self.model, config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the head by ``value``; from a plain layer, made by transformers to resize, take the weight only: a soft cap stays."""
        if type(value) is nn.Linear and getattr(value, "bias", None) is None and type(self.lm_head) is Head:
            self.lm_head.weight, self.lm_head.out_features = value.weight, value.out_features
        else:
            self.lm_head = value

    def forward(  # as many arguments as transformers passes by name: its generate() and Trainer look them up in the signature
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: StateCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        **packing: Unpack[Packing],
    ) -> CausalLMOutputWithPast | tuple:
        """Compute logits [B, T, vocab] of each next token, and their loss if ``labels`` are given.

        In training the losses that feed-forwards report (:func:`linattn.ffn.reports`) are added to it.

        Args:
            input_ids: [B, T].
            attention_mask: [B, past + T], 0 for padding on either side; only its last T columns are read.
            past_key_values: a :class:`StateCache`; it is brought up to date in place.
            inputs_embeds: [B, T, D] in place of ``input_ids``.
            labels: [B, T], the tokens themselves (they are shifted here), -100 for tokens without a loss.
            use_cache: return the state as ``past_key_values``; by default outside training.
            logits_to_keep: only the last so many positions get logits; 0: all. Or their indices.
            num_items_in_batch: divide the summed loss by this instead of the number of labels.
            cu_seqlens: [N + 1]: B is 1 and N sequences lie end to end, of which none sees another; of each the first token is no
                label. The state has N rows.
            output_hidden_states: return the input of each layer and the output of the last norm, [B, T, D] each.
            output_attentions: refused if true.
            return_dict: return an output with names, else a tuple; by default the config's value.
            position_ids: [B, T] or [1, T] int: where a position does not follow the one before by 1 a packed sequence begins, as
                transformers' own masks hold it, in rows of any number. Beside padding they say nothing, and mixers count positions
                themselves. On a GPU they are read, a synchronisation that ``cu_seqlens`` avoids.
            packing: transformers' other keywords for packed rows, those of :class:`linattn.hf.packing.Packing`.

        Raises:
            TypeError: for an unknown keyword.
            ValueError: for shapes that do not fit and for two arguments that pack differently.
        """
        asked = self._call(
            input_ids, inputs_embeds, attention_mask, past_key_values, use_cache=use_cache, output_hidden_states=output_hidden_states,
            output_attentions=output_attentions, position_ids=position_ids, cu_seqlens=cu_seqlens, given=packing,
        )  # fmt: skip
        labels, kept = asked.labels(labels, logits_to_keep), _kept(logits_to_keep)
        with reports() if labels is not None and self.training else nullcontext(()) as told:
            hidden, cache, between = self._hidden(asked)
        logits = self.lm_head(hidden if kept is None else hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch)
            if told:
                loss = loss + added_loss(told) * _weight(labels, num_items_in_batch)
        for r in told:  # passed on to reports() around this call
            report(r.losses, r.counts)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=between)
        return self._out(out, return_dict)
