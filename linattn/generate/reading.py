"""Reading of prompts on a GPU: pieces of several prompts at once, as CUDA graphs of a fixed number of rows and tokens.

A batch is read in parts, a few layers each, so that the steps of decoding rows run between them: reading is a thousand small kernels,
which do not overlap with those of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linattn.generate import captured
from linattn.generate.packing import ALIGNED, Packed, Packing
from linattn.generate.pending import Pending
from linattn.generate.request import Prompt, Request
from linattn.generate.sampling import greedy, sample
from linattn.state import State

ROWS = 16  # largest number of rows of a batch of short pieces
PARTS = 8  # parts of the layers, one between two steps
PATIENCE = 16  # steps that a batch may wait for more rows: reading one row costs a GPU about as much as reading eight

Piece = tuple[Sequence[int], State | Packed | None]  # tokens, and the state before them; None: the fresh one


class Batch:
    """Reader of pieces of at most ``tokens`` tokens of up to ``rows`` prompts, padded, on fixed buffers.

    ``model`` is a backbone, ``fresh`` its state of one row before the first token. The model's own code is run, on a GPU as CUDA graphs.
    """

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __init__(self, model: Any, fresh: State, rows: int, tokens: int) -> None:
        self._model = model
        self._states = State([{name: t.contiguous() for name, t in layer.items()} for layer in fresh.fork(rows).clone().layers])
        self._given = Packing(self._states.layers)
        self._fresh = self._given.pack(0, 1)[0].bytes.expand(rows, -1)
        self._found: Packing | None = None  # outputs of the last layers, at fixed addresses because of CUDA graphs
        self._input = torch.ones(rows, 1 + tokens, dtype=torch.int64, device=fresh.position.device)  # the number of tokens, then the tokens
        self._last = torch.empty(0)
        self._before: dict[int, tuple[Tensor, dict[str, Tensor | None]]] = {}  # outputs of the previous layers
        self._new: dict[int, list[dict[str, Tensor]]] = {}
        self._taken = 0
        layers = len(model.layers)
        cuts = [layers * i // PARTS for i in range(PARTS + 1)]
        self._parts = [self._part(range(a, b)) for a, b in zip(cuts, cuts[1:], strict=False) if a < b]

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def begin(self, pieces: Sequence[Piece]) -> list[Callable[[], None]]:
        """Take ``pieces``; returns the calls that read them, in their order."""
        width = self._input.shape[1]
        lines = [[len(ids), *ids, *[0] * (width - 1 - len(ids))] for ids, _ in pieces]
        self._input[: len(pieces)].copy_(torch.tensor(lines), non_blocking=True)
        self._given.unpack(self._fresh, 0)
        for i, (_, state) in enumerate(pieces):
            if isinstance(state, Packed):
                self._given.unpack(state.bytes[None], i)
            elif state is not None:
                named = zip(self._states.layers, state.layers, strict=True)
                torch._foreach_copy_(self._given.views(i), [layer[name][0] for own, layer in named for name in own])
        self._taken = len(pieces)
        return self._parts

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def results(self) -> tuple[Tensor, list[Packed]]:
        """Copies of the last hidden states [n, D] of the pieces that have been read, and of the states after them."""
        found = self._found
        if found is None:
            new = (layer for part in self._new.values() for layer in part)
            found = Packing([{name: layer[name] for name in own} for own, layer in zip(self._states.layers, new, strict=True)])
        if self._input.is_cuda:
            self._found = found
        return self._last[: self._taken].clone(), found.pack(0, self._taken)

    def _part(self, layers: range) -> Callable[[], None]:
        """Call that runs ``layers`` on the outputs of the layers before them."""
        run = partial(self._run, layers)
        if not self._input.is_cuda:
            run()
            return run
        replay = captured.Graph(run, None).replay
        replay()  # the next part is captured on its results
        return replay

    def _run(self, layers: range) -> None:
        count, ids, model = self._input[:, 0].contiguous(), self._input[:, 1:], self._model
        x, shared = self._before[layers.start] if layers.start else (model.entered(model.embedding(ids)), {})
        shared = dict(shared)
        x, new = model.run_layers(layers, x, self._states, shared, return_state=True, mask=count)
        self._new[layers.start] = [{name: _dense(t) for name, t in layer.items()} for layer in new]
        self._before[layers.stop] = x, shared
        if layers.stop == len(model.layers):
            hidden = model.joined(x)
            last = (count - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
            self._last = hidden.gather(1, last)[:, 0]


def _dense(t: Tensor) -> Tensor:
    """``t`` or a copy, contiguous and aligned for copies of whole words."""
    return t if t.is_contiguous() and t.data_ptr() % ALIGNED == 0 else t.clone(memory_format=torch.contiguous_format)


class Batches:
    """Batches for pieces of at most ``block`` tokens: many rows of few tokens, and few rows of whole blocks, captured at first use.

    They are made for a pool of ``slots``.
    """

    def __init__(self, model: Any, fresh: State, block: int, slots: int) -> None:
        self._model, self._fresh, self._block = model, fresh, block
        self._most = max(2, min(ROWS, slots // 8))
        self._few = max(1, self._most // 4)
        self._short = max(1, block * self._few // self._most)  # tokens of a short piece: both batches have as many tokens
        self._made: dict[int, Batch] = {}

    @property
    def early(self) -> int:
        """Prompts that may be read before there is a slot for them: one batch, while those of another take free slots."""
        return self._most + PARTS

    def clear(self) -> None:
        """Drop the captured batches, after a change of weights."""
        self._made.clear()

    def rows(self, longest: int) -> int:
        """Rows of the batch for pieces of ``longest`` tokens at most."""
        return self._most if longest <= self._short else self._few

    def of(self, pieces: Sequence[Piece]) -> Batch:
        """Batch that reads ``pieces``."""
        rows = self.rows(max(len(ids) for ids, _ in pieces))
        if rows not in self._made:
            self._made[rows] = Batch(self._model, self._fresh, rows, self._short if rows == self._most else self._block)
        return self._made[rows]


class FirstTokens:
    """First token of each request of ``prompts``, drawn from ``logits``, [1, V] of each prompt, and copied from ``device`` to the host."""

    def __init__(self, prompts: Sequence[Prompt], logits: Sequence[Tensor], device: torch.device) -> None:
        self.prompts = prompts
        if any(request.sampling.temperature for prompt in prompts for request in prompt.requests):
            pairs = [(p, r, own) for p, own in zip(prompts, logits, strict=True) for r in p.requests]
            drawn = [(prompt, request, sample(own, request.sampling, request.generator)) for prompt, request, own in pairs]
        else:
            best = greedy(torch.cat(list(logits))).split(1) if logits else ()
            drawn = [(p, request, token) for p, token in zip(prompts, best, strict=True) for request in p.requests]
        empty = torch.empty(0, dtype=torch.int64, device=device)
        self._pending = Pending(drawn, torch.cat([empty, *(token for *_, token in drawn)]))

    @property
    def finished(self) -> bool:
        """True if :meth:`wait` returns at once."""
        return self._pending.finished

    def wait(self) -> list[tuple[Prompt, Request, Tensor, int]]:
        """Return each request with its prompt and its token, as a tensor [1] and as a number."""
        return [(*items, number) for items, number in zip(*self._pending.values(), strict=True)]


class Reading:
    """Pieces of prompts, with their numbers of tokens, that ``batch`` reads; ``first`` are the first tokens after prompts that end."""

    def __init__(self, pieces: list[tuple[Prompt, int]], batch: Batch, own: Sequence[Piece]) -> None:
        self.pieces, self.batch, self.parts = pieces, batch, deque(batch.begin(own))
        self.first: FirstTokens | None = None

    @property
    def finished(self) -> bool:
        """True if the first tokens have arrived."""
        return self.first is not None and self.first.finished

    def run(self) -> None:
        """Run the next part."""
        self.parts.popleft()()
