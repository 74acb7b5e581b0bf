"""Beam search over states: continuing one beam in several ways copies its row."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.arguments import described, whole
from linattn.generate.stream import as_prompt, language_model
from linattn.ops.checks import check_tokens


class Beam(NamedTuple):
    """A continuation that beam search has found: its tokens, and the sum of their log-probabilities over their number ** length_penalty."""

    tokens: list[int]
    score: float


@torch.no_grad()
def beam_search(
    model: Any, ids: Tensor | Sequence[int], *, beams: int = 4, max_new_tokens: int, stop: Collection[int] = (), length_penalty: float = 1.0
) -> list[Beam]:  # fmt: skip
    """Find likely continuations of ``ids``: every step keeps the ``beams`` likeliest one-token extensions.

    The prompt is read once; afterwards a step takes one row of state for each beam.

    Args:
        model: a :class:`linattn.LanguageModel` or its Hugging Face twin, in ``eval``.
        ids: the prompt, [T] or a list of integers, at least one.
        beams: beams kept, and continuations returned at most.
        max_new_tokens: tokens to add at most, at least 1.
        stop: tokens that end a continuation, of which each is the last.
        length_penalty: 0 compares sums of log-probabilities, 1 their means; larger values favour longer continuations.

    Returns:
        The continuations, the best first. The search ends early when no beam, at its present length, scores better than the worst of
        ``beams`` ended ones.

    Raises:
        TypeError, ValueError: for an invalid argument.
    """
    backbone = language_model("model", model)
    prompt = as_prompt(ids, backbone.device).long()
    if prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"ids must be a prompt [T] of at least one token, but came with shape {list(prompt.shape)}")
    check_tokens("ids", prompt[None], backbone.lm_head.out_features)
    given: object = stop
    if isinstance(given, str) or not isinstance(given, Collection) or not all(isinstance(token, int) for token in given):
        raise TypeError(f"stop must be a list of tokens, integers, but came as {described(stop)}")
    width, ends = whole("beams", beams, 1), frozenset(stop)
    if not isinstance(length_penalty, int | float) or isinstance(length_penalty, bool):
        raise TypeError(f"length_penalty must be a number, but came as {described(length_penalty)}")
    alive: list[list[int]] = [[]]
    ended: list[Beam] = []
    sums = torch.zeros(1, device=prompt.device)
    hidden, state = backbone.model(prompt[None], None, return_state=True)
    for length in range(1, whole("max_new_tokens", max_new_tokens, 1) + 1):
        totals = sums[:, None] + backbone.lm_head(hidden[:, -1]).float().log_softmax(-1)
        best, places = totals.flatten().topk(min(width * (1 + len(ends)), totals.numel()))  # contain enough unfinished beams
        found = [(*divmod(place, totals.shape[1]), total) for total, place in zip(best.tolist(), places.tolist(), strict=True)]
        ended += [Beam([*alive[row], token], total / length**length_penalty) for row, token, total in found[:width] if token in ends]
        ended = sorted(ended, key=lambda beam: -beam.score)[:width]
        kept = [one for one in found if one[1] not in ends][:width]
        alive, sums = [[*alive[row], token] for row, token, _ in kept], sums.new_tensor([total for *_, total in kept])
        done = not kept or (len(ended) == width and kept[0][2] / length**length_penalty <= ended[-1].score)
        if done or length == max_new_tokens:
            break
        last = prompt.new_tensor([tokens[-1:] for tokens in alive])
        hidden, state = backbone.model(last, state.select([row for row, *_ in kept]), return_state=True)
    if not done:
        ended += [Beam(tokens, total / length**length_penalty) for tokens, total in zip(alive, sums.tolist(), strict=True)]
    return sorted(ended, key=lambda beam: -beam.score)[:width]
