"""Decoding: the prompt in one pass, then a step per token with a state of constant size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linattn.generate.sampling import Sampling, sample

if TYPE_CHECKING:
    from linattn.models import Backbone, LanguageModel
    from linattn.state import State

PREFILL = 4096  # tokens of the prompt that are read at once: a longer one takes no more memory


def stream(
    model: LanguageModel,
    ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Iterator[Any]:
    """Continue ``ids``, token by token.

    Args:
        model: a :class:`linattn.LanguageModel` or its Hugging Face twin.
        ids: the prompt: [T] or a list of integers, or a batch [B, T]; at least one token.
        max_new_tokens: how many tokens at most.
        temperature, top_k, top_p: see :class:`linattn.generate.Sampling`; temperature 0 is greedy.
        stop: tokens that end a sequence; the one that did is still given out.
        generator: of the random numbers, on the model's device; None: torch's own.

    Returns:
        An iterator of integers for one sequence, of tensors [B] for a batch. A row that has ended repeats its stop token,
        and the iterator ends when all have.

    Raises:
        ValueError: at once, for an empty prompt and arguments out of range.
    """
    sampling = Sampling(temperature, top_k, top_p)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be an integer of at least 0, but came as {max_new_tokens!r}")
    prompt = torch.as_tensor(ids, device=model.lm_head.weight.device)
    if prompt.ndim not in (1, 2) or prompt.numel() == 0:
        raise ValueError(f"ids must be a prompt [T] or [B, T] of at least one token, but came with shape {list(prompt.shape)}")
    if prompt.is_floating_point():
        raise ValueError(f"ids must be integers, but came as {prompt.dtype}")
    rows = _decode(model, prompt.long().reshape(-1, prompt.shape[-1]), max_new_tokens, sampling, frozenset(stop), generator)
    return (int(row) for row in rows) if prompt.ndim == 1 else rows


def _decode(
    model: LanguageModel, ids: Tensor, count: int, sampling: Sampling, stop: frozenset[int], generator: torch.Generator | None
) -> Iterator[Tensor]:
    if count == 0:
        return
    stops = torch.tensor(sorted(stop), dtype=torch.int64, device=ids.device)
    hidden, state = prefill(model.model, ids)
    ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    token = ids[:, -1]
    for step in range(count):
        with torch.inference_mode():
            if step:
                hidden, state = model.model(token[:, None], state, return_state=True)
            token = torch.where(ended, token, sample(model.lm_head(hidden[:, -1]), sampling, generator))
            if stop:
                ended = ended | torch.isin(token, stops)
        yield token
        if stop and bool(ended.all()):
            return


@torch.inference_mode()
def prefill(model: Backbone, ids: Tensor) -> tuple[Tensor, State | None]:
    """Read ``ids`` [B, T] piece by piece; the hidden states [B, t, D] of the last piece and the state after it."""
    first, *rest = ids.split(PREFILL, 1)
    hidden, state = model(first, return_state=True)
    for piece in rest:
        hidden, state = model(piece, state, return_state=True)
    return hidden, state
