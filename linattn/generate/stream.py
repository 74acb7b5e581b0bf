"""Decoding: the prompt in one pass, then a step per token with a state of constant size."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from linattn.arguments import described, whole
from linattn.generate import captured
from linattn.generate.captured import Choice, Step
from linattn.generate.prefill import prefill
from linattn.generate.sampling import Sampling, sample
from linattn.ops.checks import tensor

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
        max_new_tokens: number of tokens at most.
        temperature, top_k, top_p: see :class:`linattn.generate.Sampling`; temperature 0 is greedy.
        stop: tokens that end a sequence; the stop token itself is returned too.
        generator: for the random numbers, on the model's device; None: torch's default.
        state: the state after the tokens before ``ids``, with a row for each sequence; None: no tokens.

    Returns:
        An iterator of integers for one sequence, of tensors [B] for a batch. A row that has ended repeats its stop token,
        and the iterator ends when all have. Its ``state`` can be continued.

    Raises:
        ValueError: at the call, for an empty prompt and arguments out of range.
    """
    sampling = Sampling(temperature, top_k, top_p)
    given: object = stop
    if isinstance(given, str) or not isinstance(given, Collection) or not all(isinstance(token, int) for token in given):
        raise TypeError(f"stop must be a list of tokens, integers, but came as {described(stop)}")
    choice = Choice(partial(sample, sampling=sampling, generator=generator), sampling, generator, tuple(sorted(frozenset(stop))))
    whole("max_new_tokens", max_new_tokens, 0)
    device = language_model("model", model).lm_head.weight.device
    if generator is not None and (not isinstance(generator, torch.Generator) or generator.device.type != device.type):
        raise TypeError(f"generator must be a torch.Generator on {device}, where the model is, but came as {described(generator)}")
    prompt = as_prompt(ids, device)
    if prompt.ndim not in (1, 2) or prompt.numel() == 0:
        raise ValueError(f"ids must be a prompt [T] or [B, T] of at least one token, but came with shape {list(prompt.shape)}")
    rows = prompt.long().reshape(-1, prompt.shape[-1])
    if state is not None and not hasattr(state, "rows"):
        raise TypeError(f"state must be a linattn.State, but came as {described(state)}")
    if state is not None and state.rows != len(rows):
        raise ValueError(f"state must have a row for each sequence of ids, {len(rows)}, but came with {state.rows}")
    return Tokens(model, rows, max_new_tokens, choice, state, single=prompt.ndim == 1)


def language_model(name: str, model: Any) -> Any:
    """Return ``model`` if it has the parts that decoding needs; else raise TypeError."""
    if not isinstance(getattr(getattr(model, "lm_head", None), "weight", None), Tensor) or not hasattr(model, "model"):
        raise TypeError(f"{name} must be a linattn.LanguageModel or its Hugging Face twin, but came as {described(model)}")
    return model


def as_prompt(ids: Any, device: torch.device) -> Tensor:
    """Return ``ids`` as a tensor of integers; else raise ValueError."""
    try:
        prompt = torch.as_tensor(ids, device=device)
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        raise ValueError(f"ids must be integers [T] or [B, T], but came as {described(ids)}") from None
    if tensor("ids", prompt).dtype not in (torch.uint8, torch.int16, torch.int32, torch.int64) and prompt.numel():
        raise ValueError(f"ids must be integers, but came as {prompt.dtype}")
    return prompt


class Tokens(Iterator[Any]):
    """Iterator over the tokens of :func:`stream`, with the state after them.

    The model's own code reads the prompt and the token after it. A captured step (``linattn.generate.captured``) reads the others
    where one can be made and enough tokens are left. ``how`` says which of the two runs, and why.
    """

    def __init__(
        self, model: Any, ids: Tensor, count: int, choice: Choice, state: State | None, *, single: bool, ahead: bool = True
    ) -> None:
        self._model, self._choice, self._single = model, choice, single
        self._unread, self._state, self._left = ids, state, count
        self._ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self._last, self._hidden = ids[:, -1], ids.new_empty(0)
        self._known: Tensor | None = None  # the next token, if a captured step found it before it was given up
        self._step: Step | None = None
        self._captures = True  # a step may still be captured
        self._runs_ahead, self._ahead = ahead and ids.is_cuda, False  # _ahead: the step has read the last token
        self.how = "no token has been read yet"

    @property
    def state(self) -> State:
        """State after the prompt and all tokens returned so far."""
        self._extend_capacity()
        with self._held():
            if self._step is not None:
                self._run()
                return self._step.state
        self._read()
        assert self._state is not None
        return self._state

    @property
    def unfinished_state(self) -> State:
        """State without the last token if it has not been read yet."""
        with self._held():
            if self._step is not None:
                return self._step.state
        assert self._state is not None
        return self._state

    @property
    def nbytes(self) -> int:
        """Bytes of the current state; unlike :attr:`state` it reads no token."""
        if (step := self._step) is not None:
            return step.nbytes
        return 0 if self._state is None else self._state.nbytes

    def __iter__(self) -> Self:
        return self

    @torch.no_grad()  # not inference mode: tokens and state may enter a call with gradients
    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        self._extend_capacity()
        with self._held():  # keeps the generation of another thread from taking the step
            token = self._captured() if self._step is not None else self._eager()
            self._left -= 1
            if not self._single and not self._choice.stops:
                return token
            return self._seen(token)

    def _held(self) -> AbstractContextManager[Any]:
        return nullcontext() if (step := self._step) is None else step.lock

    def _eager(self) -> Tensor:
        """Compute the next token by the model's own code."""
        before, one, model = self._state, self._unread.shape[1] == 1, self._model
        if self._known is None:
            self._read()
            token = torch.where(self._ended, self._last, self._choice.choose(model.lm_head(self._hidden)))
            self.mark_ended(token)
        else:
            token, self._known = self._known, None
        self._unread, self._last = token[:, None], token
        if before is not None and one and self._captures:
            assert self._state is not None
            grown = captured.growth(model.model, before, self._state)
            if grown is None:
                self._capture()
            else:  # a bounded window may still fill
                self.how = f"as the model is written: {grown}"
        return token

    def _capture(self) -> None:
        """Continue with a captured step, if there is one, from the last token, which is unread."""
        assert self._state is not None
        model, self._captures = self._model, False
        step = captured.refusal(model) or captured.step_of(model.model, model.lm_head, self._state, self._left)
        if isinstance(step, str):
            self.how = f"as the model is written: {step}"
            return
        with step.lock:
            step.load(self, self._state, self._last, self._ended, self._choice)
            self._step, self._state, self.how = step, None, f"by a captured step, {step.how}"

    def _extend_capacity(self) -> None:
        """Continue with a step of larger cache capacity if the slots of the current one are used up."""
        with self._held():
            if self._step is None or self._ahead or self._step.free:
                return
            self._leave()
        self._capture()

    def _captured(self) -> Tensor:
        assert self._step is not None
        self._run()
        self._ahead = False
        return self._step.tokens.clone()

    def _run(self) -> None:
        """Let the captured step read the last token if it has not yet."""
        assert self._step is not None
        if not self._ahead:
            self._step.run()
            self._ahead = True

    def _seen(self, token: Tensor) -> Any:
        """Return ``token`` [B] once it is known whether it is the last; meanwhile a GPU computes the next."""
        ended = (self._ended if self._step is None else self._step.ended).all()
        if self._runs_ahead and self._step is not None and self._step.free and self._left:
            note = torch.cat([token, ended[None]]).to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._run()
            event.synchronize()
            values = note.tolist()
        else:
            values = [*token.tolist(), bool(ended)]
        self._left = 0 if self._choice.stops and values[-1] else self._left
        return values[0] if self._single else token

    def _read(self) -> None:
        if not self._unread.shape[1]:
            return
        hidden, self._state = prefill(self._model.model, self._unread, self._state)
        self._hidden, self._unread = hidden[:, -1], self._unread[:, :0]

    def mark_ended(self, token: Tensor) -> None:
        """Mark rows whose ``token`` [B] is a stop token as ended: for callers that chose the first token."""
        for stop in self._choice.stops:
            self._ended = self._ended | (token == stop)

    def give_up(self) -> None:
        """Continue without the captured step, which another generation needs."""
        self._leave()
        self.how = "as it is written: another generation took the captured step"

    @torch.no_grad()
    def _leave(self) -> None:
        """Take back the state from the captured step, and the token that it found or has not read yet."""
        step = self._step
        assert step is not None
        self._state, self._ended, token = step.state, step.ended.clone(), step.tokens.clone()
        self._known, self._last = (token, self._last) if self._ahead else (None, token)
        self._unread = token[:, None][:, int(self._ahead) :]
        self._step, self._ahead = None, False
