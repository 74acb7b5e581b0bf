"""Decoding: the prompt in one pass, then a step per token with a state of constant size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from linattn.generate.prefill import prefill
from linattn.generate.sampling import Sampling, sample

if TYPE_CHECKING:
    from linattn.models import LanguageModel
    from linattn.state import State


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
    state: State | None = None,
) -> Tokens:
    """Continue ``ids``, token by token.

    Args:
        model: a :class:`linattn.LanguageModel` or its Hugging Face twin.
        ids: the prompt: [T] or a list of integers, or a batch [B, T]; at least one token.
        max_new_tokens: how many tokens at most.
        temperature, top_k, top_p: see :class:`linattn.generate.Sampling`; temperature 0 is greedy.
        stop: tokens that end a sequence; the one that did is still given out.
        generator: of the random numbers, on the model's device; None: torch's own.
        state: what has been read before ``ids``, with a row for each sequence; None: nothing.

    Returns:
        An iterator of integers for one sequence, of tensors [B] for a batch. A row that has ended repeats its stop token,
        and the iterator ends when all have. Its ``state`` can be continued.

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
    rows = prompt.long().reshape(-1, prompt.shape[-1])
    if state is not None and state.rows != len(rows):
        raise ValueError(f"state must have a row for each sequence of ids, {len(rows)}, but came with {state.rows}")
    return Tokens(model, rows, max_new_tokens, sampling, frozenset(stop), generator, state, single=prompt.ndim == 1)


class Tokens(Iterator[Any]):
    """The tokens that :func:`stream` gives out, and the state behind them."""

    def __init__(
        self,
        model: LanguageModel,
        ids: Tensor,
        count: int,
        sampling: Sampling,
        stop: frozenset[int],
        generator: torch.Generator | None,
        state: State | None,
        *,
        single: bool,
    ) -> None:
        self._model, self._sampling, self._generator, self._single = model, sampling, generator, single
        self._unread, self._state, self._left = ids, state, count
        self._stops = torch.tensor(sorted(stop), dtype=torch.int64, device=ids.device)
        self._ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self._last, self._hidden = ids[:, -1], ids.new_empty(0)

    @property
    def state(self) -> State:
        """The state after the prompt and every token that has been given out."""
        self._read()
        assert self._state is not None
        return self._state

    @property
    def nbytes(self) -> int:
        """Bytes of the state so far; unlike :attr:`state` it reads nothing."""
        return 0 if self._state is None else self._state.nbytes

    def __iter__(self) -> Self:
        return self

    @torch.inference_mode()
    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        self._read()
        token = torch.where(self._ended, self._last, sample(self._model.lm_head(self._hidden), self._sampling, self._generator))
        self._unread, self._last = token[:, None], token
        self._left -= 1
        if len(self._stops):
            self._ended = self._ended | torch.isin(token, self._stops)
            self._left = 0 if bool(self._ended.all()) else self._left
        return int(token) if self._single else token

    def _read(self) -> None:
        if self._unread.shape[1]:
            hidden, self._state = prefill(self._model.model, self._unread, self._state)
            self._hidden, self._unread = hidden[:, -1], self._unread[:, :0]
