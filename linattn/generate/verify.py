"""Verification of drafts: one call of a model reads several tokens of each row, and the state advances by the accepted ones.

The call changes no state and records the inputs of the mixers. The state after the kept tokens comes from running the mixers alone on
these inputs, without feed-forwards and head. So mixers need no code to roll back rejected tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from linattn.generate import capacity
from linattn.state import State


@dataclass(frozen=True)
class Layout:
    """Layout of rows of ``lengths`` tokens, at least 1, in one call: packed end to end, or padded on the right with a mask."""

    lengths: tuple[int, ...]
    packed: bool
    device: torch.device

    def ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Tokens of ``rows`` as [1, sum of lengths] if packed, else [B, T] with zeros behind shorter rows."""
        width = max(self.lengths)
        laid = [[i for row in rows for i in row]] if self.packed else [[*row, *[0] * (width - len(row))] for row in rows]
        return torch.tensor(laid, device=self.device)

    @property
    def keywords(self) -> dict[str, Tensor]:
        """Keywords of a model or a mixer for the layout; empty if all rows are equally long."""
        if self.packed:
            return {"cu_seqlens": torch.tensor([0, *self.lengths], device=self.device).cumsum(0)}
        if min(self.lengths) == max(self.lengths):
            return {}
        width = torch.arange(max(self.lengths), device=self.device)
        return {"mask": width < torch.tensor(self.lengths, device=self.device)[:, None]}

    def tokens(self, x: Tensor) -> Tensor:
        """Real tokens of x [B, T, ...], row after row: [sum of lengths, ...]."""
        if self.packed:
            return x[0]
        return torch.cat([row[:n] for row, n in zip(x, self.lengths, strict=True)])

    def cut(self, x: Tensor, kept: Sequence[int]) -> Tensor:
        """First ``kept`` tokens of each row of x [B, T, ...], in the layout with those lengths."""
        if not self.packed:
            return x[:, : max(kept)]
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        index = [start + i for start, n in zip(starts, kept, strict=True) for i in range(n)]
        return x[:, torch.tensor(index, device=x.device)]


class Chunk:
    """Call of the backbone ``model`` on the tokens ``rows``, one list a row of ``state``, each of at least one token.

    ``hidden`` [sum of lengths, D] are the hidden states, row after row.
    """

    def __init__(self, model: Any, rows: Sequence[Sequence[int]], state: State) -> None:
        lengths = tuple(len(row) for row in rows)
        packed = len(set(lengths)) > 1 and all(layer.mixer.info.recurrent for layer in model.layers)
        self._layout = Layout(lengths, packed, model.device)
        self._model, self._before = model, state
        with recorded_inputs(model) as self._inputs:
            hidden, after = model(self._layout.ids(rows), state, return_state=True, **self._layout.keywords)
        self.hidden, self._after = self._layout.tokens(hidden), after

    def advance(self, kept: Sequence[int]) -> State:
        """State after the first ``kept`` tokens of each row, at least one."""
        if tuple(kept) == self._layout.lengths:
            return compacted(self._after, self._model)
        lengths = tuple(kept)
        layout = Layout(lengths, self._layout.packed, self._layout.device)
        keywords, layers = layout.keywords, []
        shared: dict[str, Tensor | None] = {}  # by mixer, the tensor that its last layer passed on
        for layer, old, x in zip(self._model.layers, self._before.layers, self._inputs, strict=True):
            mixer, name = layer.mixer, layer.mixer.info.name
            sharing = {"shared": shared.get(name), "return_shared": True} if mixer.shares else {}
            _, state, *passed = mixer(self._layout.cut(x, kept), old, return_state=True, **keywords, **sharing)
            layers.append(state)
            shared[name] = passed[0] if passed else None
        return compacted(State(layers), self._model)


def accepted(row: Sequence[int], chosen: Sequence[int], stops: Collection[int] = ()) -> list[int]:
    """New tokens after the first of ``row``; ``chosen`` are the model's tokens after each of ``row``.

    The last one is the first that is in ``stops`` or differs from the next of ``row``.
    """
    right = next((i for i, token in enumerate(row[1:]) if chosen[i] != token or token in stops), len(row) - 1)
    return list(chosen[: right + 1])


@contextmanager
def recorded_inputs(model: Any) -> Iterator[list[Tensor]]:
    """Record the inputs [B, T, D] of the mixers of ``model`` in the calls of this thread."""
    found: list[Tensor] = []
    thread = threading.get_ident()

    def note(_: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == thread:
            found.append(args[0])

    hooks = [layer.mixer.register_forward_pre_hook(note) for layer in model.layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def compacted(state: State, model: Any, slack: float = 1.25) -> State:
    """Drop slots of growing states without a token of any row, once there are ``slack`` times as many slots as the longest row's tokens."""
    layers = []
    for layer, own in zip(state.layers, capacity.slots_of(model), strict=True):
        valid = layer.get("valid") if own else None
        longest = 0 if valid is None else int(valid.sum(1).max())
        if valid is None or valid.shape[1] <= slack * longest:
            layers.append(layer)
            continue
        order = (~valid).long().argsort(dim=1, stable=True)[:, :longest]
        layers.append({name: _gathered(t, order) if name in own else t for name, t in layer.items()})
    return State(layers)


def _gathered(t: Tensor, order: Tensor) -> Tensor:
    """Slots ``order`` [B, n] of t [B, slots, ...]."""
    return t.gather(1, order.view(*order.shape, *[1] * (t.ndim - 2)).expand(-1, -1, *t.shape[2:]))
