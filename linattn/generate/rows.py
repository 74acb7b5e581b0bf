"""Rows of a pool: the states of many sequences in fixed buffers, and the captured steps that advance the first rows of them.

Active rows are the first ones, so that a step works on a view of the buffers and no state is gathered or scattered. A row that leaves is
replaced by the last active one. A step is captured for each of a few numbers of rows (:func:`bucket`), a smaller one than those that exist
only after a while, because capturing takes as long as hundreds of steps.

Softmax layers have a slot per token. All rows write the token of a step into the same slot, number ``used``; a row's tokens are in the
slots just before it, as many as the row has read, and the mask of the layer hides the others. When no slot is left, all rows are
moved to the front together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.generate import capacity, captured
from linattn.generate.capacity import TAKEN
from linattn.generate.captured import Choice, Step
from linattn.generate.deferral import Deferral
from linattn.generate.packing import Packed, Packing
from linattn.generate.sampling import greedy
from linattn.models.memory import require
from linattn.state import State

SMALLER = {"cuda": 512, "cpu": 64}  # steps with more rows than needed before a smaller step is captured
SPARE = 64  # minimum of slots beyond the longest sequence; after as many steps rows are moved to the front


def bucket(count: int, slots: int) -> int:
    """Rows that the step for ``count`` active ones works on: the next power of two, at most ``slots``."""
    return min(1 << (count - 1).bit_length(), slots)


class Rows:
    """States of ``slots`` sequences like the one-row state ``fresh``, and the next token of each, ``tokens`` [slots] int64.

    ``context`` is the number of tokens that one row may read where layers keep every token. ``defer``: steps write states only every
    few tokens.
    """

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def __init__(self, model: Any, fresh: State, slots: int, context: int, *, defer: bool = False) -> None:
        self._model, self._slots = model, slots
        self.names = capacity.slots_of(model.model)
        self.growing = any(self.names)
        self._size = context + max(SPARE, context // 4) if self.growing else 0
        row = capacity.preallocated(fresh.to("meta"), self.names, self._size).nbytes
        row += row // 6 if defer else 0
        require(slots * row, f"slots = {slots:,} states of {row:,} bytes")
        self._used, self._lengths = 0, [0] * slots
        self._buffers = capacity.preallocated(fresh.fork(slots), self.names, self._size)
        self._deferral = Deferral(self._buffers) if defer else None
        self.tokens = torch.zeros_like(self._buffers.position)
        self._layers = [{name: t for name, t in layer.items() if name != TAKEN} for layer in self._buffers.layers]
        self._packing = Packing(self._layers, [self.tokens])
        self._steps: dict[int, Callable[[], Tensor]] = {}
        self._spared: Counter[int] = Counter()  # by number of rows: steps that ran with more rows instead
        self._weights: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self._buffers.nbytes + (0 if self._deferral is None else self._deferral.nbytes)

    def changed(self) -> bool:
        """True if weights or settings of the model have changed since the last call; captured steps are dropped then."""
        before, self._weights = self._weights, captured.fingerprint(self._model.model, self._model.lm_head)
        if before != self._weights:
            self._steps.clear()
            self._spared.clear()
        return before is not None and before != self._weights

    def write(self, row: int, state: State | Packed, token: Tensor) -> None:
        """Put the one-row ``state`` and its next ``token`` [1] into ``row``; its old contents are overwritten."""
        if self._deferral is not None:
            self._packing.move(row, row)  # clears deferred tokens of the row's previous sequence
        if isinstance(state, Packed):
            self._packing.unpack(state.bytes[None], row)
            self.tokens[row : row + 1].copy_(token)
            return
        length = capacity.taken(state, self.names) or 0
        if length > self._used:
            self._shift(length)
        *own, place = self._packing.views(row)[: 1 + sum(map(len, self._layers))]
        places, values, views = [place], [token[0]], iter(own)
        for there, layer, names in zip(self._layers, state.layers, self.names, strict=True):
            for name, view in zip(there, views, strict=False):
                if name in names:
                    view.zero_()
                places.append(view[self._used - length : self._used] if name in names else view)
                values.append(layer[name][0])
        torch._foreach_copy_(places, values)
        self._lengths[row] = length

    def read(self, row: int) -> State:
        """Copy of the state of ``row``."""
        own, kept = slice(row, row + 1), slice(self._used - self._lengths[row], self._used)
        return State(
            {name: t[own, kept].clone() if name in names else self._copy(t, own) for name, t in layer.items() if name != TAKEN}
            for layer, names in zip(self._buffers.layers, self.names, strict=True)
        )

    def read_first(self, count: int) -> State:
        """Copy of the states of the first ``count`` rows, with the slots of the longest; a shorter row's first slots are masked."""
        kept = slice(self._used - max(self._lengths[:count]), self._used)
        return State(
            {name: t[:count, kept].clone() if name in names else self._copy(t, slice(count)) for name, t in layer.items() if name != TAKEN}
            for layer, names in zip(self._buffers.layers, self.names, strict=True)
        )

    def leave(self, row: int, last: int) -> None:
        """Move the row ``last`` to ``row``, and fill ``last`` with zeros."""
        self._packing.move(last, row)
        self._lengths[row], self._lengths[last] = self._lengths[last], 0
        if not any(self._lengths):
            self._use(0)

    def step(self, count: int, soon: int = 0) -> Tensor:
        """Advance the first ``count`` rows by their tokens; writes the most likely next ones into ``tokens``, returns logits [count, V].

        ``soon`` is the number of rows expected after some steps. The logits are overwritten by the next step.
        """
        if self.growing:
            longest = max(self._lengths[:count])
            if self._used == self._size or self._used > 2 * longest + SPARE:  # a CPU reads all slots in use, so keep them few
                self._shift(longest)
        n = self._chosen(count, min(soon, self._slots))
        if n not in self._steps:
            self._steps[n] = self._step(n)
        logits = self._steps[n]()
        if self.growing:
            self._used += 1
            self._lengths[:count] = [length + 1 for length in self._lengths[:count]]
        return logits[:count]

    def _chosen(self, count: int, soon: int) -> int:
        """Rows of the step to run for ``count`` active ones."""
        n = bucket(count, self._slots)
        if n in self._steps:
            return n
        if larger := [size for size in self._steps if size > n]:
            self._spared[n] += 1
            return n if self._spared[n] > SMALLER.get(self.tokens.device.type, 0) else min(larger)
        return bucket(max(count, soon), self._slots)

    def _tensors(self) -> list[Tensor]:
        """All tensors with a row per sequence; the slot counters are common to all rows."""
        return [t for layer in self._layers for t in layer.values()]

    def _copy(self, t: Tensor, rows: slice) -> Tensor:
        """Copy of ``rows`` of the buffer ``t``, all tokens written."""
        return t[rows].clone() if self._deferral is None else self._deferral.written(t, rows)

    def _use(self, used: int) -> None:
        self._used = used
        for layer in self._buffers.layers:
            if TAKEN in layer:
                layer[TAKEN].fill_(used)

    def _shift(self, used: int) -> None:
        """Move the tokens of all rows so that they end before slot ``used``."""
        kept = max(self._lengths)
        for layer, names in zip(self._buffers.layers, self.names, strict=True):
            for name in names:
                t = layer[name]
                moved = t[:, self._used - kept : self._used].clone()
                t.zero_()
                t[:, used - kept : used] = moved
        self._use(used)

    def _step(self, n: int) -> Callable[[], Tensor]:
        """Step of the first ``n`` rows: captured if possible, else by the uncaptured model. The states are unchanged."""
        views = State({name: t[:n] for name, t in layer.items()} for layer in self._buffers.layers)
        tokens, deferral = self.tokens[:n], self._deferral
        if deferral is not None:
            deferral.flush()
        if captured.refusal(self._model) is None:
            inputs = [tokens, *(t for layer in views.layers for t in layer.values())]
            before = [t.clone() for t in inputs]
            try:
                return self._captured(views, tokens)
            except captured.UNTRACEABLE:
                pass
            finally:
                torch._foreach_copy_(inputs, before)
                if deferral is not None:
                    deferral.clear()
                    self._packing = Packing(self._layers, [self.tokens, *deferral.tensors])

        def written() -> Tensor:
            if deferral is not None:
                deferral.flush()
            return _written(self._model, views, tokens)

        return written

    def _captured(self, views: State, tokens: Tensor) -> Callable[[], Tensor]:
        """Captured step on ``views``, which overwrites them."""
        step = Step(self._model.model, self._model.lm_head, views, tokens=tokens, deferral=self._deferral)
        step.start(Choice(greedy, "pool"))
        step.enlarge()

        def run() -> Tensor:
            step.run()
            if self._deferral is not None:
                self._deferral.stepped()
            assert step.logits is not None
            return step.logits

        return run


def _written(model: Any, views: State, tokens: Tensor) -> Tensor:
    """Step on ``views`` by the uncaptured model."""
    hidden, state = model.model(tokens[:, None], views, return_state=True)
    logits = model.lm_head(hidden)[:, -1]
    for old, new in zip(views.layers, state.layers, strict=True):
        for name, t in old.items():
            t.copy_(new[name])
    tokens.copy_(greedy(logits))
    return logits


def shapes_of(state: State, names: Sequence[tuple[str, ...]]) -> Any:
    """Names, dtypes and shapes of a state's tensors without rows and, for those in ``names``, slots; None for another number of layers."""
    if len(state.layers) != len(names):
        return None
    return [
        [(name, t.dtype, t.shape[2:] if name in own else t.shape[1:]) for name, t in layer.items()]
        for layer, own in zip(state.layers, names, strict=True)
    ]


@torch.inference_mode(mode=False)
@torch.no_grad()
def fresh_state(model: Any) -> State:
    """State of one row before its first token.

    Raises:
        ValueError: naming the layer whose state grows other than by slots, or whose rows depend on each other.
    """
    for name, module in model.named_modules():
        if getattr(module, "eval_capacity", None) is not None:
            raise ValueError(f"model cannot be pooled: {name} has an eval_capacity, so that a token's output depends on the other rows")
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    fresh = model.model(ids[:, :0], return_state=True)[1]
    grown = captured.growth(model.model, fresh, model.model(ids, fresh, return_state=True)[1])
    if grown is not None:
        raise ValueError(f"model cannot be pooled: {grown}")
    return fresh
