"""Language backbone as transformers models; every parameter has the name it has in :class:`linattn.LanguageModel`."""

from __future__ import annotations

import itertools
import os
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from linattn import mixers
from linattn.ffn import added_loss, report, reports
from linattn.hf import card, remote
from linattn.hf.cache import StateCache, keyword
from linattn.hf.config import LMConfig
from linattn.hf.decoder import Answers, Decoder
from linattn.hf.folder import listed
from linattn.hf.generation import StateGenerationMixin
from linattn.hf.packing import Packing
from linattn.mixers import Mixer
from linattn.models import Backbone, quantised
from linattn.models.language import Head, head
from linattn.models.loss import TokenLoss


class LinattnPreTrainedModel(Answers, PreTrainedModel):
    """Base of both classes: the backbone, its initialisation, cache and precision."""

    config_class = LMConfig
    config: LMConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_context_parallel = False  # torch's own, which exchanges no states, unlike linattn.parallel.context_parallel
    accepts_loss_kwargs = True
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012  (as the base class declares it)

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config)
        self.model = Decoder(config)
        mixers = [(place, m) for place, m in self.named_modules() if isinstance(m, Mixer)]
        # regular expressions that match whole names, because other modules may have weights with similar names
        self._keep_in_fp32_modules_strict = [rf"^{place}\.{name}$" for place, m in mixers for name in m.keep_float32]
        self._on_meta = self.model.embedding.weight.is_meta  # from_pretrained builds on the meta device, then loads

    @property
    def _backbone(self) -> Backbone:
        return self.model

    @property
    def _supports_sdpa(self) -> bool:  # type: ignore[override]
        """True if some layers attend to a cache by torch's scaled dot product; read by transformers."""
        return any(not mixers.info(name).recurrent for name in self.config.mixer_names)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: saved folders name the classes by :mod:`linattn.hf.remote`, and copies of these files would not run without the
        package.
        """

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise parameters that a checkpoint lacks from a new model; construction has initialised the others."""
        if not self._on_meta:
            return
        tensors = itertools.chain(self.named_parameters(), self.named_buffers())
        lacking = {n: t for n, t in tensors if not t.is_meta and not getattr(t, "_is_hf_initialized", False)}
        matrices = lacking.keys() & quantised.matrices(self)  # a tied head's is the embedding's
        if missing := sorted(matrices & self.state_dict().keys()):
            raise ValueError(f"quantised weights are missing: {listed(missing)}")
        if lacking := {n: t for n, t in lacking.items() if n not in matrices}:
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
            raise ValueError("use_safetensors must be True: a pickle can run code when it is read, so none is accepted")
        return super().from_pretrained(*args, **{**kwargs, "use_safetensors": True})

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, with a model card beside the weights if there is none yet."""
        self.config.auto_map = remote.AUTO_MAP
        if quantised.formats(self):
            self.config.quantization_config = quantised.config_of(self)
        elif hasattr(self.config, "quantization_config"):  # of another model of this config
            del self.config.quantization_config
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            card.write(self, save_directory)
            remote.write(save_directory)


def _with_logits(logits_to_keep: int | Tensor) -> slice | Tensor | None:
    """Positions that get logits; None: all."""
    if isinstance(logits_to_keep, Tensor):
        return logits_to_keep
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise ValueError(f"logits_to_keep must be at least 0, or indices, but came as {logits_to_keep!r}")
    return slice(-logits_to_keep, None) if logits_to_keep else None


def _weight(labels: Tensor, items: Tensor | int | None, aligned: bool) -> Tensor | float:
    """Share of this batch in the ``items`` by which the losses of several batches are divided: 1 for a batch on its own."""
    return 1.0 if items is None else ((labels if aligned else labels[:, 1:]) != -100).sum() / items


class LinattnModel(LinattnPreTrainedModel):
    """Hidden states: ``AutoModel``."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config)
        self.post_init()

    forward = Answers.answer


class LinattnForCausalLM(LinattnPreTrainedModel, StateGenerationMixin):
    """Next-token logits, loss and ``generate()``: ``AutoModelForCausalLM``."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LMConfig) -> None:
        super().__init__(config)
        self.vocab_size = config.vocab_size
        self.lm_head = head(self.model, config)
        self.token_loss: TokenLoss | None = None  # None: transformers' loss of all logits, which are then returned
        self.post_init()

    def _loss(self, given: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
        """Loss of hidden states if ``token_loss`` is set, else of logits."""
        if self.token_loss is not None:
            return self.token_loss(given, self.lm_head, labels, items)
        return self.loss_function(given, labels, vocab_size=self.config.vocab_size, num_items_in_batch=items)

    def get_decoder(self, *_: Any, **__: Any) -> nn.Module:
        return self.model

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the head by ``value``; from a plain layer, made by transformers to resize, take the weight only: a soft cap stays."""
        if type(value) is nn.Linear and getattr(value, "bias", None) is None and type(self.lm_head) is Head:
            self.lm_head.weight, self.lm_head.out_features = value.weight, value.out_features
        else:
            self.lm_head = value

    def forward(  # noqa: PLR0913  transformers' generate() and Trainer look these names up in the signature
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
        cache: StateCache | None = None,
        **packing: Unpack[Packing],
    ) -> CausalLMOutputWithPast | tuple:
        """Compute logits [B, T, vocab] of each next token, and their loss if ``labels`` are given.

        In training the losses that feed-forwards report (:func:`linattn.ffn.reports`) are added to it.

        Args:
            input_ids: [B, T].
            attention_mask: [B, past + T], 0 for padding on either side; only its last T columns are read.
            past_key_values: a :class:`StateCache`, updated in place; ``cache``, transformers' name since 5.24, is the same argument.
            inputs_embeds: [B, T, D] in place of ``input_ids``.
            labels: [B, T], the tokens themselves (they are shifted here), -100 for tokens without a loss.
            use_cache: return the state in the output, as ``past_key_values`` or, with transformers 5.24, ``cache``; by default
                outside training.
            logits_to_keep: number of last positions to compute logits for, 0 for all; or their indices.
            num_items_in_batch: divide the summed loss by this instead of the number of labels.
            cu_seqlens: [N + 1]: B is 1 and N isolated sequences lie end to end; the first token of each is not a label. The state
                has N rows.
            output_hidden_states: return the input of each layer and the output of the last norm, [B, T, D] each.
            output_attentions: must not be True.
            return_dict: return an output with names, else a tuple; by default the config's value.
            position_ids: [B, T] or [1, T] int: a packed sequence begins where a position is not the previous one plus 1, as in
                transformers' masks. They are ignored beside padding, and mixers compute positions themselves. Reading them
                synchronises with a GPU; ``cu_seqlens`` avoids that.
            packing: transformers' other keywords for packed rows, those of :class:`linattn.hf.packing.Packing`.

        Raises:
            TypeError: for an unknown keyword.
            ValueError: for wrong shapes, and for two arguments that pack differently.
        """
        asked = self._call(
            input_ids, inputs_embeds, attention_mask, {"past_key_values": past_key_values, "cache": cache}, use_cache=use_cache,
            output_hidden_states=output_hidden_states, output_attentions=output_attentions, position_ids=position_ids,
            cu_seqlens=cu_seqlens, given=packing,
        )  # fmt: skip
        aligned = self.token_loss is not None and self.token_loss.aligned
        labels, kept = labels if aligned else asked.labels(labels, logits_to_keep), _with_logits(logits_to_keep)
        with reports() if labels is not None and self.training else nullcontext(()) as reported:
            hidden, state, between = self._hidden(asked)
        chunked = labels is not None and self.token_loss is not None
        logits = None if chunked else self.lm_head(hidden if kept is None else hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self._loss(hidden if logits is None else logits, labels, num_items_in_batch)
            if reported:
                loss = loss + added_loss(reported) * _weight(labels, num_items_in_batch, aligned)
        for r in reported:  # pass on to an enclosing reports()
            report(r.losses, r.counts)
        return self._out(CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=between, **keyword(state)), return_dict)
