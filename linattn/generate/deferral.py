"""Deferred writes of the states of a pool's rows: a step reads each state and writes it only every few tokens.

At many rows states are most of a step's memory traffic. See linattn/ops/torch/deferred.py for the recurrence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from linattn.ops.gpu import on_gpu
from linattn.ops.inputs import Flat
from linattn.ops.torch import deferred as portable
from linattn.ops.torch.deferred import Deferred
from linattn.state import State

SLOTS = 12  # steps between writes: with more, reading the tokens costs what deferral saves


class Deferral:
    """Tokens that the rows of ``buffers`` have read and that have not been written into their states.

    Writes of different states are staggered, so that steps take about the same time. The rows of ``tensors``
    move with those of the states, and are zero where a row has read none.
    """

    @torch.inference_mode(mode=False)
    def __init__(self, buffers: State) -> None:
        self._leaves = [t for layer in buffers.layers for t in layer.values()]
        self._first = torch.arange(len(self._leaves), device=buffers.position.device)
        self.calls = self._first.clone()  # of each deferred state, staggered: slots of zeros change nothing
        self._steps = 0  # since all tokens were written
        self._beside: dict[int, Deferred] = {}  # by the addresses of states

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens."""
        return sum(t.nbytes for t in self.tensors)

    @torch.inference_mode(mode=False)
    def beside(self, inputs: Sequence[Tensor], number: int, call: Flat) -> Deferred | None:
        """Tokens of the state that is input ``number`` of a step and the first rows of a buffer; None if it is written at each step."""
        views = inputs[number]
        place = views.data_ptr()
        if _refusal(call, views) is not None or all(t.data_ptr() != place for t in self._leaves):
            return None
        if place not in self._beside:
            rows = next(len(t) for t in self._leaves if t.data_ptr() == place)
            number = len(self._beside)
            self._beside[place] = portable.empty(call, rows, SLOTS, self.calls[number : number + 1])
        return self._beside[place].rows(slice(len(views)))

    @property
    def tensors(self) -> list[Tensor]:
        """Keys, values and decays; more after the capture of a step."""
        return [t for kept in self._beside.values() for t in kept[:3] if t is not None]

    def stepped(self) -> None:
        """Count a step on the host; the device counts its own."""
        self._steps += 1

    def written(self, buffer: Tensor, rows: slice) -> Tensor:
        """Copy of ``rows`` of a ``buffer`` with all of their tokens written into it."""
        place = buffer.data_ptr()
        if place not in self._beside or not self._steps:
            return buffer[rows].clone()
        used = (list(self._beside).index(place) + self._steps) % SLOTS
        return portable.written(buffer[rows], self._beside[place].rows(rows), used)

    @torch.inference_mode(mode=False)
    def flush(self) -> None:
        """Write all tokens into the states."""
        if not self._steps:
            return
        for buffer in self._leaves:
            if buffer.data_ptr() in self._beside:
                buffer.copy_(self.written(buffer, slice(None)))
        self.clear()

    @torch.inference_mode(mode=False)
    def clear(self) -> None:
        """Drop all tokens."""
        self._steps = 0
        self.calls.copy_(self._first)
        for t in self.tensors:
            t.zero_()


def _refusal(call: Flat, state: Tensor) -> str | None:
    if not on_gpu(state):
        return portable.refusal(call)
    from linattn.ops.triton.deferred import refusal

    return refusal(call)
