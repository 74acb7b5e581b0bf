"""Drafters, which propose the next tokens of a batch by prompt lookup or a small model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from linattn.generate import captured
from linattn.generate.captured import Choice
from linattn.generate.lookup import Lookup
from linattn.generate.noise import Noise, Rule
from linattn.generate.prefill import prefill
from linattn.generate.verify import Layout
from linattn.state import State

ENOUGH = 256  # tokens from which on capturing a step of the small model pays


class Drafter(Protocol):
    """Drafts for all rows of a batch."""

    def propose(self, counts: Sequence[int]) -> list[list[int]]:
        """Propose at most ``counts[b]`` next tokens of each row b."""
        ...

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        """Append each row's new tokens."""
        ...


@dataclass(frozen=True)
class Source:
    """Source of drafts: ``model``, or the text itself if that is None; ``before`` are the earlier tokens of each row."""

    model: Any = None
    before: Sequence[Sequence[int]] = ()

    def drafter(self, ids: Tensor, rule: Rule, noise: Noise | None) -> Drafter:
        """Make a drafter of the tokens after ``ids`` [B, T]."""
        rows: list[list[int]] = ids.tolist()
        if self.before:
            rows = [[*first, *row] for first, row in zip(self.before, rows, strict=True)]
        return LookupDrafter(rows) if self.model is None else ModelDrafter(self.model, rows, rule, noise)


class LookupDrafter:
    """Drafts from the rows' own texts, which begin with the prompts ``rows``."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._rows = [Lookup(row) for row in rows]

    def propose(self, counts: Sequence[int]) -> list[list[int]]:
        return [row.propose(n) if n else [] for row, n in zip(self._rows, counts, strict=True)]

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        for known, new in zip(self._rows, rows, strict=True):
            known.extend(new)


class ModelDrafter:
    """Drafts of ``model`` after the prompts ``rows``, chosen by the ``rule`` and the ``noise`` of the tokens themselves.

    With equal noise (Gumbel coupling) two distributions agree nearly as often as possible, and always if they are equal. The
    state of ``model`` contains no drafts: accepted ones are read again, together with the token after them.
    """

    def __init__(self, model: Any, rows: Sequence[Sequence[int]], rule: Rule, noise: Noise | None) -> None:
        self._model, self._rule, self._noise = model, rule, noise
        self._unread, self._made = [list(row) for row in rows], [0] * len(rows)
        self._state: State | None = None
        self._now: Tensor | None = None  # noise of the token to draft
        self._choice = Choice(lambda logits: rule.tokens(logits, self._now), object())

    @torch.no_grad()
    def propose(self, counts: Sequence[int]) -> list[list[int]]:
        """Propose at most ``counts[b]`` next tokens of each row b; all rows are decoded up to the largest count."""
        if not any(counts):
            return [[] for _ in counts]
        hidden, state = self._read()
        self._refill(0)
        tokens = [self._choice.choose(self._model.lm_head(hidden))]
        if max(counts) > 1:
            tokens += self._decoded(state, tokens[0], max(counts) - 1)
        return [row[:n] for row, n in zip(torch.stack(tokens, 1).tolist(), counts, strict=True)]

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        for row, new in enumerate(rows):
            self._unread[row] += new
            self._made[row] += len(new)

    def _read(self) -> tuple[Tensor, State]:
        """Read the unread tokens; returns the last hidden state of each row [B, D] and the state."""
        model, lengths = self._model.model, tuple(map(len, self._unread))
        packed = self._state is not None and len(set(lengths)) > 1 and all(layer.mixer.info.recurrent for layer in model.layers)
        layout = Layout(lengths, packed, self._model.device)
        keywords: dict[str, Any] = layout.keywords
        hidden, self._state = prefill(model, layout.ids(self._unread), self._state, **keywords)
        self._unread = [[] for _ in lengths]
        if layout.packed or layout.keywords:
            hidden = layout.tokens(hidden)[torch.tensor(lengths, device=hidden.device).cumsum(0) - 1]
        else:
            hidden = hidden[:, -1]
        return hidden, self._state

    def _decoded(self, state: State, token: Tensor, count: int) -> list[Tensor]:
        """Decode ``count`` tokens after ``token`` [B], by a captured step if there is one."""
        model, found = self._model, []
        step = captured.refusal(model) or captured.step_of(model.model, model.lm_head, state, ENOUGH)
        if isinstance(step, str):
            for i in range(count):
                hidden, state = prefill(model.model, token[:, None], state)
                self._refill(i + 1)
                found.append(token := self._choice.choose(model.lm_head(hidden[:, -1])))
            return found
        with step.lock:
            step.load(self, state, token, torch.zeros_like(token, dtype=torch.bool), self._choice)
            for i in range(count):
                self._refill(i + 1)
                step.run()
                found.append(step.tokens.clone())
        return found

    def _refill(self, ahead: int) -> None:
        """Put the noise of the token ``ahead`` places after each row's next one into the buffer that a step reads."""
        if self._noise is not None:
            self._now = torch.empty_like(self._noise.like) if self._now is None else self._now
            self._now.copy_(self._noise.at([(row, made + ahead) for row, made in enumerate(self._made)]))
