"""Captured steps in ``generate`` without beams, because transformers' loop takes more time per token than a step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from linattn.generate.captured import Choice, hooked
from linattn.generate.drafter import Source
from linattn.generate.noise import Rule
from linattn.generate.sampling import draw, greedy
from linattn.generate.speculate import Speculated
from linattn.generate.tokens import Tokens
from linattn.hf.cache import CACHE, StateCache, keyword
from linattn.state import State

_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)  # depend only on the logits
_KNOWN_CRITERIA = (MaxLengthCriteria, EosTokenCriteria)  # criteria whose limits can be read
_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def refusal(
    model: Any, processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: Any, synced: bool, cache: Any
) -> str | None:
    """Reason why transformers' loop must generate; None if a captured step can."""
    if hooked(model):
        return "the model has hooks or a replaced forward, which must run for every token"
    if other := [type(p).__name__ for p in processors if type(p) not in _WARPERS]:
        return f"{', '.join(other)} may read earlier tokens"
    if other := [type(c).__name__ for c in criteria if type(c) not in _KNOWN_CRITERIA]:
        return f"{', '.join(other)} reads every token"
    if not isinstance(cache, StateCache):
        return "there is no cache"
    if wanted := [name for name in _RECORDS if config.return_dict_in_generate and getattr(config, name)]:
        return f"{', '.join(wanted)} is requested for every token"
    return "several processes generate in lockstep" if synced else None


@dataclass(frozen=True)
class Assistance:
    """Drafts by ``model``, or by prompt lookup of at most ``count`` tokens if it is None."""

    model: Any
    count: int | None

    def tokens(self, model: Any, read: Tensor, mask: Tensor | None, token: Tensor, limit: int, rule: Rule, stops: tuple[int, ...],
               state: State | None) -> Speculated:  # fmt: skip
        """Tokens after ``token`` [B], which follows the prompts ``read`` [B, T] with the mask of their last columns."""
        keep = torch.ones_like(read, dtype=torch.bool) if mask is None else mask[:, -read.shape[1] :].bool()
        before = [row[kept].tolist() for row, kept in zip(read, keep, strict=True)]
        tokens = Speculated(model, token[:, None], limit, rule, stops, state, Source(self.model, before), single=False)
        tokens.longest = self.count if self.model is None and self.count is not None else tokens.longest
        return tokens


def sample(
    model: Any, ids: Tensor, processors: LogitsProcessorList, criteria: StoppingCriteriaList, config: Any, streamer: Any,
    kwargs: dict[str, Any], assistance: Assistance | None = None,
) -> Any:  # fmt: skip
    """Generate as ``GenerationMixin._sample`` does, in the cases that :func:`refusal` allows: new tokens after ``ids`` [B, T].

    Tokens and random numbers equal those of transformers' loop; the cache has read all tokens but the last. ``assistance`` drafts tokens.
    """
    stops, limit = _stops(criteria), min(c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)) - ids.shape[1]
    choice = _choice(processors, config.do_sample, stops)
    mask = kwargs.get("attention_mask")
    out = model._prefill(ids, config, kwargs)
    cache: StateCache = out[CACHE]
    token: Tensor | None = choice.choose(out.logits[:, -1])
    assert token is not None
    del out
    if assistance is None:
        tokens = Tokens(model, token[:, None], limit - 1, choice, cache.state, single=False, ahead=False)
    else:
        rule = Rule(partial(_probabilities, processors) if config.do_sample else None)
        tokens = assistance.tokens(model, ids, mask, token, limit - 1, rule, stops, cache.state)
    tokens.mark_ended(token)
    ended, pad, found = torch.zeros_like(token, dtype=torch.bool), config._pad_token_tensor, []
    while token is not None:
        found.append(token if not stops else torch.where(ended, pad.to(token.device), token))
        if streamer is not None:
            streamer.put(found[-1].cpu())
        for stop in stops:
            ended = ended | (token == stop)
        token = None if stops and bool(ended.all()) else next(tokens, None)
    if streamer is not None:
        streamer.end()
    cache.state, cache.seen = tokens.unfinished_state, cache.seen + len(found) - 1
    sequences: Any = torch.cat([ids, torch.stack(found, 1)], 1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(sequences=sequences, **keyword(cache))


def _stops(criteria: StoppingCriteriaList) -> tuple[int, ...]:
    ids = [c.eos_token_id for c in criteria if isinstance(c, EosTokenCriteria)]
    return tuple(sorted({int(i) for t in ids for i in torch.as_tensor(t).reshape(-1).tolist()}))


def ends(new: Tensor, criteria: StoppingCriteriaList, config: Any) -> Tensor:
    """Number of the ``new`` tokens [B, n] before each row's padding, [B]; n for rows without padding."""
    stops, pad = _stops(criteria), config._pad_token_tensor
    stopped = torch.isin(new, torch.tensor(stops, dtype=new.dtype, device=new.device)).long()
    real = stopped.cumsum(1) - stopped == 0
    if stops and any(type(c) not in _KNOWN_CRITERIA for c in criteria):  # such as a stop text: padding follows it
        real &= (new != pad.to(new.device)).long().flip(1).cummax(1).values.flip(1).bool() | stopped.bool()
    return real.sum(1)


def _choice(processors: LogitsProcessorList, do_sample: bool, stops: tuple[int, ...]) -> Choice:
    def choose(logits: Tensor) -> Tensor:
        return draw(_probabilities(processors, logits)) if do_sample else _scores(processors, logits).argmax(-1)

    name: Hashable = (do_sample, *((type(p).__name__, *sorted(vars(p).items())) for p in processors))
    return Choice(choose if do_sample or len(processors) else greedy, name, None, stops)


def _scores(processors: LogitsProcessorList, logits: Tensor) -> Tensor:
    scores = logits.to(torch.float32, copy=True)
    for processor in processors:
        scores = processor(None, scores)
    return scores


def _probabilities(processors: LogitsProcessorList, logits: Tensor) -> Tensor:
    return _scores(processors, logits).softmax(-1)
