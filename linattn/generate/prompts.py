"""Reading of a pool's prompts between its steps: which pieces come next, and the states and first tokens after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.generate import captured
from linattn.generate.packing import Packed
from linattn.generate.prefixes import PrefixCache
from linattn.generate.reading import PATIENCE, Batches, FirstTokens, Reading
from linattn.generate.request import Prompt
from linattn.state import State


class PromptReader:
    """Reads ``prompts`` in pieces that end at multiples of ``block``, at most ``block`` tokens of all prompts between two steps.

    A GPU reads pieces of several prompts as one batch, part by part. States after whole blocks are kept in ``prefixes``.

    Args:
        model: language model.
        fresh: its state of one row before the first token.
        prefixes: cache of states, with blocks of ``block`` tokens.
        slots: of the pool.
        growing: True if a layer's state has a slot per token.
    """

    def __init__(self, model: Any, fresh: State, prefixes: PrefixCache, slots: int, *, growing: bool) -> None:
        self._model, self._fresh, self._prefixes, self._growing = model, fresh, prefixes, growing
        self._block = prefixes.block
        self._batches = None if growing else _batches(model, fresh, self._block, slots)
        self._waited = PATIENCE  # steps since the last batch
        self._read: Reading | None = None  # pieces that are being read now, as a batch
        self.prompts: list[Prompt] = []

    @property
    def early(self) -> int:
        """Prompts that may be read before there is a slot for them."""
        return 0 if self._batches is None else self._batches.early

    def clear(self) -> None:
        """Drop kept states and captured batches, after a change of weights."""
        self._prefixes.clear()
        if self._batches is not None:
            self._batches.clear()

    def advance(self, *, idle: bool, urgent: bool) -> FirstTokens | None:
        """Read some more, before a step; returns the first tokens after prompts that have been read.

        ``idle``: no row decodes meanwhile. ``urgent``: a slot is free, which limits how long a batch waits for more rows.
        """
        first = self.end() if self._read is not None and (idle or self._read.finished) else None
        if self._read is None and self.prompts:
            pieces = self._pieces()
            if idle or self._due(pieces, urgent):
                self._waited = 0
                if self._batches is None:
                    return self._without_ended(self._first_tokens(pieces, self._prefill(pieces)))
                own = [(p.ids[p.done : p.done + n], None if p.state is self._fresh else p.state) for p, n in pieces]
                self._read = Reading(pieces, self._batches.of(own), own)
        if self._read is not None and self._read.parts:
            self._read.run()
        self._waited += 1
        return first

    def collect(self) -> None:
        """Copy the results of a batch whose parts have all been submitted; called after a step, which hides the host's time."""
        if self._read is not None and not self._read.parts and self._read.first is None:
            self._take_results(self._read)

    def end(self) -> FirstTokens | None:
        """Finish the batch that is being read; returns the first tokens after its prompts, None if there is no batch."""
        if (read := self._read) is None:
            return None
        while read.parts:
            read.run()
        first = self._take_results(read) if read.first is None else read.first
        self._read = None
        return self._without_ended(first)

    def _without_ended(self, first: FirstTokens) -> FirstTokens:
        """Remove the prompts of ``first``, which have been read, from ``prompts``."""
        for prompt in first.prompts:
            if prompt.requests:  # else it was cancelled meanwhile
                self.prompts.remove(prompt)
        return first

    def _due(self, pieces: list[tuple[Prompt, int]], urgent: bool) -> bool:
        """True if ``pieces`` are a full batch, hold a whole block, or have waited long enough; always without batches."""
        if self._batches is None or (urgent and self._waited >= PATIENCE):
            return True
        longest = max(n for _, n in pieces)
        full = len(pieces) == self._batches.rows(longest) or len(pieces) < len(self.prompts)
        return full or longest == self._block

    def _take_results(self, read: Reading) -> FirstTokens:
        """Copy states and first tokens from a batch that has been read, at least submitted to the GPU."""
        hidden, states = read.batch.results()
        for (prompt, _), state in zip(read.pieces, states, strict=True):
            prompt.state = state
        read.first = self._first_tokens(read.pieces, hidden.split(1))
        return read.first

    def _first_tokens(self, pieces: list[tuple[Prompt, int]], hidden: Sequence[Tensor]) -> FirstTokens:
        """Record that ``pieces`` have been read; draws first tokens after prompts that end, from the last hidden states [1, D]."""
        ended = []
        for (prompt, n), last in zip(pieces, hidden, strict=True):
            prompt.done += n
            if prompt.done == len(prompt.ids):
                ended.append((prompt, last))
            elif prompt.keys:
                state = prompt.state.state() if isinstance(prompt.state, Packed) else prompt.state
                self._prefixes.put(prompt.keys[prompt.done // self._block - 1], state.clone())
        head: Any = self._model.lm_head
        together = self._batches is not None and bool(ended)  # separately on a CPU, so that bits do not depend on other prompts
        logits = head(torch.cat([last for _, last in ended])).split(1) if together else [head(last) for _, last in ended]
        return FirstTokens([prompt for prompt, _ in ended], logits, self._model.device)

    def _pieces(self) -> list[tuple[Prompt, int]]:
        """Choose the prompts to read next, with the number of tokens of each: one batch, or together at most a block."""
        left, longest = self._block, 0
        pieces: list[tuple[Prompt, int]] = []
        for prompt in self.prompts:
            found, state = self._prefixes.find(prompt.keys, prompt.done // self._block)
            if state is not None:
                prompt.done, prompt.state = found, state
            n = min(len(prompt.ids) - prompt.done, self._block)
            longest = max(longest, n)
            if n > left if self._batches is None else len(pieces) >= self._batches.rows(longest):
                break
            pieces.append((prompt, n))
            left -= n
            if self._growing:  # growing states of different lengths cannot be packed
                break
        return pieces

    def _prefill(self, pieces: list[tuple[Prompt, int]]) -> list[Tensor]:
        """Read ``pieces`` in one call and replace the states of their prompts; returns the last hidden state [1, D] of each."""
        device = self._model.device
        ids = torch.tensor([[i for p, n in pieces for i in p.ids[p.done : p.done + n]]], device=device)
        if len(pieces) == 1:
            hidden, pieces[0][0].state = self._model.model(ids, pieces[0][0].state, return_state=True)
            return [hidden[:, -1]]
        cu_seqlens = torch.tensor([0, *(n for _, n in pieces)]).cumsum(0)
        states = State.cat([p.state for p, _ in pieces if isinstance(p.state, State)])  # always without batches
        hidden, states = self._model.model(ids, states, return_state=True, cu_seqlens=cu_seqlens.to(device))
        for i, (prompt, _) in enumerate(pieces):
            prompt.state = states.select([i])
        return [hidden[:, end - 1] for end in cu_seqlens[1:].tolist()]


def _batches(model: Any, fresh: State, block: int, slots: int) -> Batches | None:
    """Batches for reading prompts on a GPU; None on a CPU, where they save no time."""
    if fresh.position.device.type != "cuda" or captured.refusal(model) is not None:
        return None
    return Batches(model.model, fresh, block, slots)
