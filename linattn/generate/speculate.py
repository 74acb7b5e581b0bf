"""Speculative decoding: drafts of several tokens are verified in one call; the tokens are those of plain decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from linattn.generate import verify_graph
from linattn.generate.captured import Choice, Step
from linattn.generate.drafter import Source
from linattn.generate.noise import Rule, noise_of
from linattn.generate.pace import LENGTHS, Pace, Share
from linattn.generate.prefill import Tell, prefill
from linattn.generate.sampling import greedy
from linattn.generate.tokens import Tokens
from linattn.generate.verify import Chunk, accepted
from linattn.generate.verify_graph import LONGEST, Verification, of_step
from linattn.state import State

LAYER = 2e-4  # lower bound of a layer's seconds in a CUDA graph of a verification
LEAD = 64  # largest lead of a row over another, whose noise is kept


class Speculated(Tokens):
    """Iterator over the tokens of :func:`linattn.generate.stream`, some of which were drafted and verified together.

    Rows of a batch get different numbers of tokens from a call; a tensor [B] is returned once each row has its token.
    Drafts have at most ``longest`` tokens. ``verified`` counts the calls, ``drafted`` and ``accepted`` the tokens of all rows.
    """

    def __init__(
        self, model: Any, ids: Tensor, count: int, rule: Rule, stops: tuple[int, ...], state: State | None, source: Source, *, single: bool,
        ahead: bool = False,
    ) -> None:  # fmt: skip
        rows = len(ids)
        self._noise = noise_of(rule, rows, model)
        self._now = None if self._noise is None else torch.empty_like(self._noise.like)  # buffer that a captured step reads
        name = "greedy" if self._noise is None else object()  # equal names keep a step's CUDA graph
        choice = Choice(lambda logits: rule.tokens(logits, self._now), name, None, stops)
        super().__init__(model, ids, count, choice, state, single=single, ahead=ahead)
        self._rule, self._pace, self._shares = rule, Pace(), [Share() for _ in range(rows)]
        self._drafter = source.drafter(ids, rule, self._noise)
        self._made: list[list[int]] = [[] for _ in range(rows)]
        self._done = [False] * rows  # rows whose last computed token is a stop token
        self._count, self._out = count, 0
        self._base: tuple[State, int] | None = None  # a state of all rows, with the number of new tokens of each row
        self._kept: Step | None = None  # a captured step that this generation has used
        self._graphs = verify_graph.refusal(model.model) is None
        self._several = greedy
        self._promising = False  # whether the last request gave a draft
        if self._graphs:
            self._pace.expect(LAYER * len(model.model.layers))
        self.longest = LENGTHS[-1]
        self.verified = self.drafted = self.accepted = 0

    @property
    def state(self) -> State:
        """State after the prompt and all tokens returned so far."""
        if all(len(made) == self._out for made in self._made):
            return super().state
        return self._at(self._out)

    @property
    def unfinished_state(self) -> State:
        """State without the last token returned."""
        if all(len(made) == self._out for made in self._made) and self._unread.shape[1]:
            return super().unfinished_state
        return self._at(self._out - 1)

    @torch.no_grad()
    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        while any(len(made) <= self._out for made in self._made):
            self._advance()
        tokens = [made[self._out] for made in self._made]
        self._out, self._left = self._out + 1, self._left - 1
        if self._noise is not None:
            self._noise.drop(min(len(made) for made in self._made))
        if self._choice.stops and all(self._ends_within(made) for made in self._made):
            self._left = 0
        return tokens[0] if self._single else torch.tensor(tokens, device=self._last.device)

    def _ends_within(self, made: Sequence[int]) -> bool:
        return made[self._out - 1] in self._choice.stops

    def _at(self, count: int) -> State:
        """State after ``count`` new tokens of each row, some of which are ahead."""
        assert self._base is not None
        state, known = self._base
        rows = [made[max(known - 1, 0) : count] for made in self._made]
        return prefill(self._model.model, torch.tensor(rows, device=self._last.device), state)[1] if rows[0] else state

    def _advance(self) -> None:
        """Compute at least one more token of every row."""
        start = time.perf_counter()
        drafts = self._drafts()
        new = self._verified(drafts, start) if drafts else self._stepped()
        for made, more in zip(self._made, new, strict=True):
            made += more
        self._done = [made[-1] in self._choice.stops for made in self._made]
        self._drafter.extend(new)

    def _drafts(self) -> list[list[int]]:
        """Draft of each row to verify now; empty if a step of one token is better or must come first."""
        if self._known is not None or self._unread.shape[1] != 1 or not self._made[0]:
            return []
        drafts = self._proposed()
        self._promising = bool(drafts)
        return [] if self._ahead else drafts

    def _proposed(self) -> list[list[int]]:
        least = min(map(len, self._made))
        rooms = [max(0, min(self.longest, self._count - len(made) - 1, LEAD - (len(made) - least))) for made in self._made]
        length = self._pace.length(rooms, self._shares)
        if not length:
            return []
        drafts = self._drafter.propose([0 if done else min(length, room) for done, room in zip(self._done, rooms, strict=True)])
        length = self._pace.length([len(draft) for draft in drafts], self._shares)
        if not length:
            return []
        for row, room in enumerate(rooms):  # ended rows keep up with the others
            drafts[row] = [self._made[row][-1]] * min(length, room) if self._done[row] else drafts[row][:length]
        return drafts

    def _stepped(self) -> list[list[int]]:
        """Compute one more token of each row, by a captured step if there is one."""
        with self._pace.losing():
            self._resume()
            self._extend_capacity()
        with self._held():
            self._refill()
            if self._step is not None:
                with self._pace.stepping():
                    token = self._ahead_of(self._captured())
            elif self._captures:
                token = self._eager().tolist()  # may capture a step
            else:
                with self._pace.stepping():
                    token = self._eager().tolist()
        self._kept = self._step
        return [[i] for i in token]

    def _ahead_of(self, token: Tensor) -> list[int]:
        """Values of ``token`` [B]; meanwhile a GPU computes the next one, unless a draft is to be verified."""
        step = self._step
        if not self._runs_ahead or step is None or not step.free or self._left < 2 or self._promising:
            return list(token.tolist())
        values = token.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._refill(1)
        super()._run()
        event.synchronize()
        return list(values.tolist())

    def _verified(self, drafts: Sequence[Sequence[int]], start: float) -> list[list[int]]:
        """Compute the tokens that the model chooses after each row's last token and ``drafts``, up to the first that was not drafted.

        Drafting began at the time ``start``.
        """
        rows = [[made[-1], *draft] for made, draft in zip(self._made, drafts, strict=True)]
        captured = self._captured_verification(max(map(len, rows)))
        if captured is not None:
            with self._held():
                new = captured(rows, self._done)
            self._note(drafts, new, time.perf_counter() - start)
            return new
        state = self._leave_step()
        chunk = Chunk(self._model.model, rows, state)
        chosen = self._chosen(chunk.hidden, rows)
        new = [
            [row[0]] * len(row) if done else accepted(row, own, self._choice.stops)
            for row, done, own in zip(rows, self._done, chosen, strict=True)
        ]
        self._state = chunk.advance([len(n) for n in new])
        self._last = torch.tensor([n[-1] for n in new], device=self._last.device)
        self._unread = self._last[:, None]
        self._ended = torch.tensor([n[-1] in self._choice.stops for n in new], device=self._last.device)
        self._note(drafts, new, time.perf_counter() - start)
        return new

    def _note(self, drafts: Sequence[Sequence[int]], new: Sequence[Sequence[int]], seconds: float) -> None:
        """Count and time a verification."""
        drafted, right = [len(draft) for draft in drafts], [len(n) - 1 for n in new]
        self.verified, self.drafted, self.accepted = self.verified + 1, self.drafted + sum(drafted), self.accepted + sum(right)
        self._pace.verified(seconds, drafted, right, self._shares)

    def _captured_verification(self, longest: int) -> Verification | None:
        """Verification of up to ``longest`` tokens of each row on the buffers of the current step, if there is one."""
        if self._noise is not None or self._step is None or not self._graphs or longest > LONGEST[-1]:
            return None
        with self._held():
            if self._base is None:
                self._base = self._step.state, len(self._made[0])
            size = next(n for n in LONGEST if n >= longest)
            return of_step(self._model.model, self._model.lm_head, self._step, size, self._choice.stops, self._several)

    def _leave_step(self) -> State:
        """Take the state back from the captured step, and keep the step if all rows have equally many tokens."""
        with self._held():
            if self._step is not None:
                self._leave()
        assert self._state is not None
        if len({len(made) for made in self._made}) == 1:
            self._base = self._state, len(self._made[0])
        return self._state

    def _chosen(self, hidden: Tensor, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tokens that the model chooses for ``rows`` from their ``hidden`` states [n, D]."""
        noise = None
        if self._noise is not None:
            noise = self._noise.at([(b, len(self._made[b]) + i) for b, row in enumerate(rows) for i in range(len(row))])
        tokens = iter(self._rule.tokens(self._model.lm_head(hidden), noise).tolist())
        return [[next(tokens) for _ in row] for row in rows]

    def _resume(self) -> None:
        """Continue with the captured step that was left for a verification, if any."""
        if self._step is None and self._kept is not None and self._unread.shape[1] == 1 and self._known is None:
            self._capture()

    def _refill(self, ahead: int = 0) -> None:
        """Put the noise of the position ``ahead`` of each row's next one into the buffer that a step reads."""
        if self._noise is not None and self._now is not None and not self._ahead:
            self._now.copy_(self._noise.at([(b, len(made) + ahead) for b, made in enumerate(self._made)]))

    def _run(self) -> None:
        self._refill()
        super()._run()

    def _read(self, piece: int | None = None, tell: Tell | None = None) -> None:
        eager = self._unread.is_cuda and not self._graphs and self._state is not None and self._unread.shape[1] == 1
        with self._pace.reading() if eager else nullcontext():
            super()._read(piece, tell)

    def give_up(self) -> None:
        self._kept = None
        super().give_up()
