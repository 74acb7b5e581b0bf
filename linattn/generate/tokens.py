"""Iterator over new tokens: by the uncaptured model first, then by a captured step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from linattn.arguments import described
from linattn.generate import captured
from linattn.generate.captured import Choice, Step
from linattn.generate.prefill import Tell, prefill, resume

if TYPE_CHECKING:
    from linattn.state import State
    from linattn.state.store import PrefixStore


class Tokens(Iterator[Any]):
    """Iterator over the tokens of :func:`stream`, with the state after them.

    The uncaptured model reads the prompt and the token after it. A captured step (``linattn.generate.captured``) reads the others
    if there can be one and enough tokens are left. ``how`` says which of the two runs, and why.
    """

    def __init__(
        self, model: Any, ids: Tensor, count: int, choice: Choice, state: State | None, *, single: bool, ahead: bool = True
    ) -> None:
        self._model, self._choice, self._single = model, choice, single
        self._unread, self._state, self._left = ids, state, count
        self._ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self._last, self._hidden = ids[:, -1], ids.new_empty(0)
        self._known: Tensor | None = None  # the next token, if a captured step computed it before being given up
        self._step: Step | None = None
        self._captures = True  # True while a step may still be captured
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

    @torch.no_grad()
    def read_prompt(self, *, piece: int | None = None, store: PrefixStore | None = None, tell: Tell | None = None) -> None:
        """Read the prompt now; does nothing once the first token has been computed.

        Args:
            piece: tokens read at a time, which bounds the memory; None: 4,096.
            store: states of prefixes. Reading starts after the longest stored prefix, and the states after every ``piece`` tokens are
                stored; ignored by a generation that began with a ``state``.
            tell: called with the number of tokens read so far.
        """
        if self._hidden.numel() or not self._unread.shape[1]:
            return
        done = 0
        if store is not None and not hasattr(store, "put"):
            raise TypeError(f"store must be a linattn.state.PrefixStore, but came as {described(store)}")
        if store is not None and self._state is None:
            done, self._state = resume(self._model, self._unread.tolist(), self._unread.shape[1] - 1, store, piece=piece, tell=tell)
            self._unread = self._unread[:, done:]
        self._read(piece, None if tell is None else lambda count: tell(done + count))

    @torch.no_grad()  # not inference mode: tokens and state may be used with gradients
    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        self._extend_capacity()
        with self._held():  # keeps other threads' generations from taking the step
            token = self._captured() if self._step is not None else self._eager()
            self._left -= 1
            if not self._single and not self._choice.stops:
                return token
            return self._seen(token)

    def _held(self) -> AbstractContextManager[Any]:
        return nullcontext() if (step := self._step) is None else step.lock

    def _eager(self) -> Tensor:
        """Compute the next token by the uncaptured model."""
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
            else:  # a bounded window may still be filling
                self.how = f"as the model is written: {grown}"
        return token

    def _capture(self) -> None:
        """Continue with a captured step, if there is one, from the last token, which has not been read yet."""
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
        """Read the last token by the captured step if it is unread."""
        assert self._step is not None
        if not self._ahead:
            self._step.run()
            self._ahead = True

    def _seen(self, token: Tensor) -> Any:
        """Return ``token`` [B] after the check for stop tokens; meanwhile a GPU computes the next."""
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

    def _read(self, piece: int | None = None, tell: Tell | None = None) -> None:
        if not self._unread.shape[1]:
            return
        hidden, self._state = prefill(self._model.model, self._unread, self._state, piece=piece, tell=tell)
        self._hidden, self._unread = hidden[:, -1], self._unread[:, :0]

    def mark_ended(self, token: Tensor) -> None:
        """Mark rows whose ``token`` [B] is a stop token as ended: for callers that chose the first token."""
        for stop in self._choice.stops:
            self._ended = self._ended | (token == stop)

    def give_up(self) -> None:
        """Leave the captured step to another generation, and capture again with the next token.
        This happens after the last token, and if two threads were given the same step.
        """
        self._leave()
        self.how, self._captures = "as the model is written: another generation took the captured step", True

    @torch.no_grad()
    def _leave(self) -> None:
        """Take back the state from the captured step, and its computed or unread token."""
        step = self._step
        assert step is not None
        self._state, self._ended, token = step.state, step.ended.clone(), step.tokens.clone()
        self._known, self._last = (token, self._last) if self._ahead else (None, token)
        self._unread = token[:, None][:, int(self._ahead) :]
        self._step, self._ahead = None, False
