"""Reading of prompts on a GPU: pieces of several prompts at once, as a CUDA graph of a fixed number of rows and tokens.

The graph runs on a stream of its own, beside the steps of the rows that decode: reading is many small kernels, which leave most of the
GPU to the steps, whose kernels have the higher priority.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from linattn.generate import captured
from linattn.generate.pending import Pending
from linattn.generate.request import Prompt, Request
from linattn.generate.sampling import sample
from linattn.state import State

ROWS = 8  # rows of a batch of short pieces
EARLY = 2 * ROWS  # prompts that may be read before there is a slot for them: one batch waits for slots while another is read
PATIENCE = 16  # steps that a batch may wait for more rows: reading one row costs a GPU about as much as reading eight


class Batch:
    """Reader of pieces of at most ``tokens`` tokens of up to ``rows`` prompts, padded and masked, on fixed buffers.

    ``model`` is a backbone, ``fresh`` its state of one row before the first token. The model's own code is run, on a GPU as one CUDA
    graph, captured on ``stream``.
    """

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __init__(self, model: Any, fresh: State, rows: int, tokens: int, stream: Any = None) -> None:
        self._model, self._fresh = model, fresh.fork(rows)
        self._states = self._fresh.clone()
        device = fresh.position.device
        self._input = torch.ones(rows, 1 + tokens, dtype=torch.int64, device=device)  # the number of tokens, then the tokens
        self._last, self._new = torch.empty(0), self._states
        self._run: Callable[[], None] = captured.Graph(self._read, None, stream).replay if device.type == "cuda" else self._read

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __call__(self, pieces: Sequence[tuple[Sequence[int], State | None]]) -> tuple[Tensor, list[State]]:
        """Read ``pieces``, each with the state before it (None: the fresh one); returns last hidden states [n, D] and the states after."""
        width = self._input.shape[1]
        lines = [[len(ids), *ids, *[0] * (width - 1 - len(ids))] for ids, _ in pieces]
        self._input[: len(pieces)].copy_(torch.tensor(lines), non_blocking=True)
        torch._foreach_copy_(_tensors(self._states), _tensors(self._fresh))
        begun = [(i, state) for i, (_, state) in enumerate(pieces) if state is not None]
        if begun:
            own = [t for i, _ in begun for t in _tensors(self._states, i)]
            torch._foreach_copy_(own, [t for _, state in begun for t in _tensors(state)])
        self._run()
        new = self._new.clone()  # the next run overwrites it
        rows = [State({name: t[i : i + 1] for name, t in layer.items()} for layer in new.layers) for i in range(len(pieces))]
        return self._last[: len(pieces)].clone(), rows

    def _read(self) -> None:
        count, ids = self._input[:, 0], self._input[:, 1:]
        mask = torch.arange(ids.shape[1], device=ids.device) < count[:, None]
        hidden, self._new = self._model(ids, self._states, return_state=True, mask=mask)
        last = (count - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        self._last = hidden.gather(1, last)[:, 0]


def _tensors(state: State, row: int | None = None) -> list[Tensor]:
    """Tensors of all rows, or of one."""
    return [t if row is None else t[row : row + 1] for layer in state.layers for t in layer.values()]


class Batches:
    """Batches for pieces of at most ``block`` tokens: many rows of few tokens, and few rows of whole blocks, captured at first use."""

    def __init__(self, model: Any, fresh: State, block: int) -> None:
        self._model, self._fresh, self._block = model, fresh, block
        self._short = max(1, block // (ROWS // 2))  # tokens of a short piece: both batches have 2 * block tokens
        self._made: dict[int, Batch] = {}
        self.stream = torch.cuda.Stream(fresh.position.device) if fresh.position.is_cuda else None

    def clear(self) -> None:
        """Drop the captured batches, after a change of weights."""
        self._made.clear()

    def rows(self, longest: int) -> int:
        """Rows of the batch for pieces of ``longest`` tokens at most."""
        return ROWS if longest <= self._short else 2

    def read(self, pieces: Sequence[tuple[Sequence[int], State | None]]) -> tuple[Tensor, list[State]]:
        """Read ``pieces``: see :class:`Batch`."""
        rows = self.rows(max(len(ids) for ids, _ in pieces))
        if rows not in self._made:
            self._made[rows] = Batch(self._model, self._fresh, rows, self._short if rows == ROWS else self._block, self.stream)
        return self._made[rows](pieces)


def beside(batches: Batches | None) -> AbstractContextManager[Any]:
    """Context in which work runs on the stream of ``batches``, if there is one, after all work submitted so far."""
    if batches is None or batches.stream is None:
        return nullcontext()
    batches.stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(batches.stream)


class Read:
    """Pieces that are being read: first tokens of the requests of prompts that end with them, ``ended``, with their logits [1, V].

    ``used`` is memory that the reading uses until it has finished.
    """

    def __init__(self, ended: Sequence[tuple[Prompt, Tensor]], used: Sequence[State]) -> None:
        self._used, self._tokens = used, []
        for prompt, logits in ended:
            self._tokens += [(prompt, r, sample(logits, r.sampling, r.generator)) for r in prompt.requests]
        tokens = [token for *_, token in self._tokens]
        self._pending = Pending(self._tokens, torch.cat(tokens) if tokens else used[0].position[:0])

    @property
    def finished(self) -> bool:
        """True if :meth:`wait` returns at once."""
        return self._pending.finished

    def wait(self) -> list[tuple[Prompt, Request, Tensor, int]]:
        """Wait for the reading; returns each prompt that ended and request with its first token, as a tensor [1] and as a number."""
        return [(*items, number) for items, number in zip(*self._pending.values(), strict=True)]
