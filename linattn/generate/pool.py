"""Pool of states: continuous batching, in which sequences join and leave at any token."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.arguments import described, whole
from linattn.data.codec import Codec
from linattn.generate import sampling
from linattn.generate.packing import Packed
from linattn.generate.pending import Pending
from linattn.generate.pool_lookup import PoolLookup
from linattn.generate.prefixes import PrefixCache
from linattn.generate.prompts import PromptReader
from linattn.generate.reading import FirstTokens
from linattn.generate.request import Prompt, Request, Stops
from linattn.generate.rows import Rows, fresh_state, shapes_of
from linattn.generate.sampling import Sampling
from linattn.generate.stream import as_prompt, language_model
from linattn.ops.checks import check_tokens, flag
from linattn.state import State

LARGEST = 2**31 - 1  # slots, and tokens of one sequence


class PoolFullError(RuntimeError):
    """The pool's queue is full."""


class Pool:
    """States of up to ``slots`` sequences of one model. Each step of decoding advances all of them by a token.

    Prompts are read between the steps of the decoding sequences, at most ``block`` tokens of all prompts at a time, in pieces that end
    at multiples of ``block``. A GPU reads pieces of several prompts as one batch, a few layers between two steps; a prompt waits some
    steps for it, and some prompts are read before their slots are free. With ``prefix_bytes`` the most recently used states after such
    pieces are kept, and a later prompt with the same beginning starts from the kept state; on a CPU its logits have the same bits as if
    the pool had read it alone from the start, on a GPU up to rounding.

    Tokens equal those of :func:`linattn.generate.stream`, with a ``seed`` those of a generator with that seed, up to rounding: sums in
    a matrix product may be ordered differently for another number of rows.

    The weights may be changed between two runs; cached prefixes are dropped then. Methods may be called from any thread.

    Args:
        model: a :class:`linattn.LanguageModel` or its Hugging Face twin, in ``eval``.
        slots: sequences that are read or decoded at the same time, at least 1. Their states are allocated at once.
        prefix_bytes: bytes of kept states of prefixes; 0: none.
        block: tokens of a piece of a prompt, and of a block of a cached prefix.
        queue: requests that may wait for a slot.
        context: tokens of one sequence, prompt included, for models with layers that keep every token; others have no limit.
        codec: decodes tokens, for ``Request.text`` and for stops that are texts.
        lookup: draft several tokens of each sequence from its own text and verify them in one call, where that is faster.
        defer: write the states of decoding sequences only every few steps and keep the last keys and values beside them. With many
            slots a GPU decodes more tokens a second; the steps that write take longer. Not together with ``lookup``.

    Raises:
        TypeError: for ``model`` or ``codec`` of another kind.
        ValueError: for a number out of range, states beyond the memory, and for a model that cannot be pooled: the message names
            its layer.
    """

    def __init__(
        self, model: Any, slots: int = 64, prefix_bytes: int = 0, *, block: int = 256, queue: int = 1024, context: int = 4096,
        codec: Codec | None = None, lookup: bool = False, defer: bool = False,
    ) -> None:  # fmt: skip
        self._model = language_model("model", model)
        self._slots, self._block = whole("slots", slots, 1, LARGEST), whole("block", block, 1)
        self._queue, self._context = whole("queue", queue, 0), whole("context", context, 1, LARGEST)
        if codec is not None and not hasattr(codec, "stream"):
            raise TypeError(f"codec must have stream(), as those of linattn.data have, but came as {described(codec)}")
        self._codec, self._device = codec, model.device
        self._fresh = fresh_state(model)
        if flag("defer", defer) and flag("lookup", lookup):
            raise ValueError("defer=True cannot be combined with lookup=True: drafts need states that are up to date")
        self._rows = Rows(model, self._fresh, self._slots, self._context, defer=defer)
        self._prefixes = PrefixCache(whole("prefix_bytes", prefix_bytes, 0), self._block)
        self._waiting: deque[Prompt] = deque()
        self._reader = PromptReader(model, self._fresh, self._prefixes, self._slots, growing=self._rows.growing)
        self._ready: deque[tuple[Request, State | Packed, Tensor]] = deque()  # their state and next token, waiting for a slot
        self._active: list[Request] = []  # in the order of their rows
        self._pending: deque[Pending] = deque()  # computed tokens that are not yet on the host
        self._found: deque[tuple[Request, int]] = deque()  # tokens that run() has not yielded yet
        self._lookup = PoolLookup(model, self._rows) if flag("lookup", lookup) else None  # requires all tokens on the host
        self._ahead = int(self._device.type == "cuda" and not lookup)  # steps that a GPU runs ahead of the host
        self._lock = threading.RLock()

    @property
    def free(self) -> int:
        """Slots without a sequence."""
        return max(0, self._slots - len(self._active) - len(self._reader.prompts))

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        slots = self._slots - len(self._active) - self.free  # of prompts being read
        return sum(len(p.requests) for p in (*self._waiting, *self._reader.prompts)) + len(self._ready) - slots

    @property
    def nbytes(self) -> int:
        """Bytes of the slots and of the cached prefixes."""
        return self._rows.nbytes + self._prefixes.nbytes

    def submit(
        self,
        ids: Tensor | Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Collection[int | str] = (),
        state: State | None = None,
        salt: str = "",
    ) -> Request:
        """Queue a request for the continuation of ``ids``, which :meth:`run` computes.

        Args:
            ids: the prompt, [T] or a list of integers, at least one.
            max_new_tokens: tokens to add at most.
            temperature, top_k, top_p: see :class:`linattn.generate.Sampling`; temperature 0 is greedy.
            seed: of this sequence's own random numbers; None: a random one.
            stop: tokens and texts that end the sequence; the last token is returned too.
            state: state of one row after the tokens before ``ids``, as :meth:`state` returns it; None: no tokens.
            salt: requests share cached prefixes only if their salts are equal, which isolates users.

        Raises:
            PoolFullError: if as many requests wait as the queue holds.
            TypeError, ValueError: for an invalid argument; the request is not queued.
        """
        if not isinstance(salt, str):
            raise TypeError(f"salt must be a string, but came as {described(salt)}")
        tokens = as_prompt(ids, torch.device("cpu"))
        if tokens.ndim != 1 or not len(tokens):
            raise ValueError(f"ids must be a prompt [T] of at least one token, but came with shape {list(tokens.shape)}")
        check_tokens("ids", tokens[None].long(), self._model.lm_head.out_features)
        numbers = tuple(tokens.tolist())
        self._check_state(state, len(numbers) + whole("max_new_tokens", max_new_tokens, 0))
        request = Request(numbers, max_new_tokens, Sampling(temperature, top_k, top_p), Stops.of(stop, self._codec), self._generator(seed))
        with self._lock:
            self._check_queue()
            if not max_new_tokens:
                request.reason = "length"
                return request
            keys = [] if state is not None else self._prefixes.keys(numbers, salt)
            self._waiting.append(Prompt([request], numbers, self._fresh if state is None else state, keys))
        return request

    def run(self) -> Iterator[tuple[Request, int]]:
        """Decode until all requests have ended; yields every new token with its request.

        Requests may be submitted, forked and cancelled meanwhile. If a caller stops early, the next run yields the remaining tokens.
        """
        if self._rows.changed():
            self._reader.clear()
        found = self._found
        while True:
            with self._lock:
                if not found and not self._busy:
                    return
                if not found:
                    self._advance()
            while True:
                try:
                    event = found.popleft()
                except IndexError:
                    break
                if event[0].reason != "cancelled":
                    yield event

    def cancel(self, request: Request) -> None:
        """End ``request`` now: its slot is freed, and :meth:`run` yields no more of its tokens. Does nothing for a request that has ended.

        Raises:
            ValueError: for a request of another pool.
        """
        with self._lock:
            if _is_request(request).done:
                return
            self._remove(self._known(request))
            request.reason = "cancelled"

    def fork(self, request: Request, *, seed: int | None = None) -> Request:
        """Queue a second continuation of ``request`` from its present state, with the same arguments but the ``seed``.

        The prompt is read once for both. The new request's ``tokens`` begin with those so far; :meth:`run` yields the ones after.

        Raises:
            PoolFullError: if as many requests wait as the queue holds.
            ValueError: for a request that has ended, and for one of another pool.
        """
        generator = self._generator(seed)
        with self._lock:
            self._check_queue()
            self._start(self._reader.end())
            self._process_pending()
            twin = self._known(_is_request(request)).twin(generator)
            prompt = self._prompt(request)
            if prompt is not None:
                prompt.requests.append(twin)
            elif request in self._active:
                row = self._active.index(request)
                self._ready.append((twin, self._rows.read(row), self._rows.tokens[row : row + 1].clone()))
            else:
                state, token = next((state, token) for other, state, token in self._ready if other is request)
                self._ready.append((twin, state, token))
        return twin

    def state(self, request: Request) -> State:
        """Copy of the state of a decoding ``request``: one row that has read the prompt and all of ``request.tokens`` but the last.

        Raises:
            ValueError: for a request that waits, is being read or has ended, and for one of another pool.
        """
        with self._lock:
            self._start(self._reader.end())
            self._process_pending()
            if self._known(_is_request(request)) not in self._active:
                raise ValueError("request must be decoding, but its prompt has not been read yet")
            return self._rows.read(self._active.index(request))

    @property
    def _busy(self) -> bool:
        return bool(self._active or self._reader.prompts or self._waiting or self._ready or self._pending)

    @torch.no_grad()
    def _advance(self) -> None:
        """Admit requests, read a piece of the prompts, and advance all active rows by a token."""
        self._join_ready()
        reading = self._reader.prompts
        while self._waiting and len(reading) + len(self._ready) < self._slots - len(self._active) + self._reader.early:
            reading.append(self._waiting.popleft())
        self._start(self._reader.advance(idle=not self._active, urgent=len(self._active) + len(self._ready) < self._slots))
        if self._lookup is not None:
            self._process_pending()
            self._take(self._lookup.advance(self._active) if self._active else [])
        elif self._active:
            soon = len(self._active) + len(self._ready) + len(self._reader.prompts) + len(self._waiting)
            logits = self._rows.step(len(self._active), soon)
            tokens = self._rows.tokens[: len(self._active)]
            if any(r.sampling.temperature for r in self._active):  # the step has chosen the most likely tokens
                sampling.sample_rows(logits, [(r.sampling, r.generator) for r in self._active], out=tokens)
            self._pending.append(Pending(list(self._active), tokens))
        self._reader.collect()
        self._process_pending(self._ahead if self._active else 0)

    def _start(self, first: FirstTokens | None) -> None:
        """Give requests their ``first`` tokens, if any; unfinished ones join when a slot is free."""
        if first is None:
            return
        for prompt, request, token, number in first.wait():
            if not request.done:
                self._ready.append((request, prompt.state, token))
                self._accept(request, [number])
        self._join_ready()

    def _join_ready(self) -> None:
        while self._ready and len(self._active) < self._slots:
            request, state, token = self._ready.popleft()
            self._rows.write(len(self._active), state, token)
            self._active.append(request)

    def _process_pending(self, keep: int = 0) -> None:
        """Process the computed tokens of all but the last ``keep`` steps, and remove sequences that end."""
        while len(self._pending) > keep:
            events = [event for event in zip(*self._pending.popleft().values(), strict=True) if event[0].reason is None]
            for request, token in events:
                request.accept(token)
            self._found.extend(events)
            for request, _ in events:
                if request.reason is not None:
                    self._remove(request)

    def _take(self, new: list[list[int]]) -> None:
        """Process the ``new`` tokens of each active request."""
        for request, tokens in zip(list(self._active), new, strict=True):
            self._accept(request, tokens)

    def _accept(self, request: Request, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to ``request``; if it ends, remove it and drop the tokens after its end."""
        if request.done:
            return
        for token in tokens:
            request.accept(token)
            self._found.append((request, token))
            if request.reason is not None:
                self._remove(request)
                return

    def _remove(self, request: Request) -> None:
        """Take ``request`` out of the queue or free its slot."""
        if request in self._active:
            row, last = self._active.index(request), len(self._active) - 1
            self._rows.leave(row, last)
            self._active[row] = self._active[last]
            self._active.pop()
        elif (prompt := self._prompt(request)) is not None:
            prompt.requests.remove(request)
            if not prompt.requests:
                (self._reader.prompts if prompt in self._reader.prompts else self._waiting).remove(prompt)
        else:
            self._ready = deque(one for one in self._ready if one[0] is not request)

    def _prompt(self, request: Request) -> Prompt | None:
        """Unfinished prompt of ``request``; None if it has been read."""
        return next((p for p in (*self._reader.prompts, *self._waiting) if request in p.requests), None)

    def _known(self, request: Request) -> Request:
        """Return ``request`` if it is one of this pool that has not ended; else raise ValueError."""
        if request.done:
            raise ValueError(f"request must be a running one, but it has ended: {request.reason}")
        if request not in self._active and self._prompt(request) is None and all(request is not r for r, _, _ in self._ready):
            raise ValueError("request must be of this pool, but came from another")
        return request

    def _generator(self, seed: int | None) -> torch.Generator:
        return sampling.generator(seed, self._device)

    def _check_queue(self) -> None:
        if self.waiting >= self._queue + self.free:
            raise PoolFullError(f"the queue is full ({self.waiting} requests wait, queue={self._queue}): submit again when some have ended")

    def _check_state(self, state: State | None, tokens: int) -> None:
        if state is not None and not isinstance(state, State):
            raise TypeError(f"state must be a linattn.State, but came as {described(state)}")
        if state is not None and (state.rows != 1 or shapes_of(state, self._rows.names) != shapes_of(self._fresh, self._rows.names)):
            raise ValueError("state must be one row of a state of this pool's model, but its tensors or their shapes differ")
        total = tokens + (0 if state is None or not self._rows.growing else int(state.position))
        if self._rows.growing and total > self._context:
            raise ValueError(f"ids and max_new_tokens make {total} tokens, but a layer keeps every token and context is {self._context}")


def _is_request(request: Any) -> Request:
    if not isinstance(request, Request):
        raise TypeError(f"request must be what submit returned, but came as {described(request)}")
    return request
