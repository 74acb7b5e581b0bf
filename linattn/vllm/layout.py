"""Layout of a mixer's state in pages of bytes: vLLM keeps one page for each sequence and layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.state import State

ALIGNMENT = 64  # bytes: every dtype can be viewed at such an offset


@dataclass(frozen=True)
class Place:
    """Offset in bytes, dtype and shape of one row of a tensor."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the row."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Places of the tensors of a state like ``state``, rows first, in a page of ``nbytes`` bytes."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.places: dict[str, Place] = {}
        self.nbytes = 0
        for name, t in state.items():
            self.places[name] = place = Place(self.nbytes, t.dtype, tuple(t.shape[1:]))
            self.nbytes += -(-place.nbytes // ALIGNMENT) * ALIGNMENT

    def view(self, pages: Tensor, name: str) -> Tensor:
        """View of the tensor ``name`` in ``pages`` [P, bytes] uint8: [P, ...]."""
        place = self.places[name]
        flat = pages[:, place.start : place.start + place.nbytes].view(place.dtype)
        return flat.unflatten(1, place.shape) if place.shape else flat[:, 0]

    def read(self, pages: Tensor, index: Tensor) -> dict[str, Tensor]:
        """Copy of the state in the pages ``index`` [N]."""
        return {name: self.view(pages, name).index_select(0, index) for name in self.places}

    def write(self, pages: Tensor, index: Tensor, state: Mapping[str, Tensor]) -> None:
        """Put ``state`` of N rows into the pages ``index`` [N]."""
        for name in self.places:
            self.view(pages, name).index_copy_(0, index, state[name])

    def fits(self, state: Mapping[str, Tensor]) -> bool:
        """True if ``state`` has the tensors of this layout, in their dtypes and shapes."""
        return {name: (t.dtype, tuple(t.shape[1:])) for name, t in state.items()} == {
            name: (place.dtype, place.shape) for name, place in self.places.items()
        }


@torch.no_grad()
def after(model: Any, tokens: int) -> State:
    """Compute the state of one row of the backbone ``model`` after ``tokens`` tokens with the id 0."""
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    return model(ids, return_state=True)[1]


def growing(model: Any) -> list[int]:
    """List the layers of a backbone whose states grow with the number of tokens."""
    states = zip(after(model, 0).layers, after(model, 2).layers, strict=True)
    return [layer for layer, (before, behind) in enumerate(states) if not Layout(before).fits(behind)]
