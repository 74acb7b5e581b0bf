"""Speculative decoding in a pool: drafts from each sequence's own text, verified for all rows in one call."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from linattn.generate.lookup import Lookup
from linattn.generate.noise import Noise, Rule
from linattn.generate.pace import LENGTHS, Pace, Share
from linattn.generate.request import Request
from linattn.generate.rows import Rows
from linattn.generate.sampling import probabilities
from linattn.generate.verify import Chunk, accepted, compacted


class Draftable:
    """Text, share of accepted drafts, and noise of one request."""

    def __init__(self, request: Request, model: Any) -> None:
        self.lookup, self.share = Lookup(request.ids), Share()
        self.rule = Rule(partial(probabilities, sampling=request.sampling) if request.sampling.temperature else None)
        self._noise = None if self.rule.probabilities is None else Noise(1, model, request.generator)
        self._start = len(request.tokens)  # earlier tokens have been drawn without this noise

    def tokens(self, request: Request, logits: Tensor) -> list[int]:
        """Choose tokens from logits [n, V] at the next n positions of ``request``."""
        noise, first = None, len(request.tokens) - self._start
        if self._noise is not None:
            self._noise.drop(first)
            noise = self._noise.at([(0, first + i) for i in range(len(logits))])
        found: list[int] = self.rule.tokens(logits, noise).tolist()
        return found


class PoolLookup:
    """Steps and verifications of the first rows of ``rows``, whose tokens are all known."""

    def __init__(self, model: Any, rows: Rows) -> None:
        self._model, self._rows, self._pace = model, rows, Pace()
        self._known: WeakKeyDictionary[Request, Draftable] = WeakKeyDictionary()

    def advance(self, active: Sequence[Request]) -> list[list[int]]:
        """Compute new tokens, at least one, of each ``active`` request, whose row has read all tokens but the last."""
        start = time.perf_counter()
        own = [self._draftable(request) for request in active]
        drafts = self._drafts(active, own)
        if drafts:
            new = self._verified(active, own, drafts)
            drafted, right = [len(draft) for draft in drafts], [len(n) - 1 for n in new]
            self._pace.verified(time.perf_counter() - start, drafted, right, [one.share for one in own])
            return new
        with self._pace.stepping():
            logits = self._rows.step(len(active))
            new = [one.tokens(request, row) for request, one, row in zip(active, own, logits.split(1), strict=True)]
            self._rows.tokens[: len(active)] = torch.tensor([n[0] for n in new])
        return new

    def _draftable(self, request: Request) -> Draftable:
        """Record of ``request``, brought up to date with all of its tokens."""
        one = self._known.get(request)
        if one is None:
            one = self._known[request] = Draftable(request, self._model)
        text = one.lookup
        text.extend(request.tokens[len(text.tokens) - len(request.ids) :])
        return one

    def _drafts(self, active: Sequence[Request], own: Sequence[Draftable]) -> list[list[int]]:
        """Draft of each row to verify now; empty if a step is better."""
        shares = [one.share for one in own]
        rooms = [min(LENGTHS[-1], request.max_new_tokens - len(request.tokens) - 1) for request in active]
        length = self._pace.length(rooms, shares)
        if not length:
            return []
        drafts = [one.lookup.propose(min(length, room)) for one, room in zip(own, rooms, strict=True)]
        length = self._pace.length([len(draft) for draft in drafts], shares)
        return [draft[:length] for draft in drafts] if length else []

    def _verified(self, active: Sequence[Request], own: Sequence[Draftable], drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        rows = [[request.tokens[-1], *draft] for request, draft in zip(active, drafts, strict=True)]
        chunk = Chunk(self._model.model, rows, self._rows.read_first(len(active)))
        logits = self._model.lm_head(chunk.hidden).split([len(row) for row in rows])
        new = [
            accepted(row, one.tokens(request, own_logits), request.stops.ids)
            for request, one, row, own_logits in zip(active, own, rows, logits, strict=True)
        ]
        state = chunk.advance([len(n) for n in new])
        for i, tokens in enumerate(new):
            self._rows.write(i, compacted(state.select([i]), self._model.model, 1.0), torch.tensor(tokens[-1:]))
        return new
