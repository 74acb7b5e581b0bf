"""Room in a state that grows: a captured step keeps its shapes, so slots for the tokens to come are there before it, and free.

Only the step has them. What anybody else sees of its state ends behind the last slot in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.state import State

TAKEN = "taken"
LEAST = {"cuda": 1024, "cpu": 256}  # slots, so that short texts need no second step, which takes longer to make on a GPU
AHEAD = 64  # free slots, at least, that a step is worth making for

Slots = Sequence[tuple[str, ...]]  # of each layer the names of what has a slot for every token


def slots_of(model: Any) -> Slots:
    """Those of a backbone, on devices where steps are captured."""
    here = next(model.parameters()).device.type in LEAST
    return [layer.mixer.growing if here else () for layer in model.layers]


def taken(state: State, slots: Slots) -> int | None:
    """How many slots every layer that has them uses; None where none has.

    Raises:
        ValueError: where they differ: such a state has not been through one model.
    """
    counts = {layer[name].shape[1] for layer, names in zip(state.layers, slots, strict=True) for name in names}
    if len(counts) > 1:
        raise ValueError(f"layers have different numbers of slots, {min(counts)} and {max(counts)}")
    return next(iter(counts), None)


def capacity(used: int, tokens: int, device: str) -> int:
    """Slots for ``used`` and more, a power of two: enough for ``tokens`` if those are few, else for a quarter again.

    A step on a GPU reads all of them, so that there are at most two and a half times as many as it needs, and those that a growing text
    goes through come back for the next text.
    """
    return max(LEAST[device], 1 << (used + min(tokens, max(used // 4, AHEAD)) - 1).bit_length())


def widened(state: State, slots: Slots, size: int) -> State:
    """Zeros for a state like ``state`` with ``size`` slots, of which none is taken. Those of one head lie side by side in memory."""
    layers = []
    for layer, names in zip(state.layers, slots, strict=True):
        wide = {name: _zeros(t, size) if name in names else torch.zeros_like(t, memory_format=torch.contiguous_format)
                for name, t in layer.items()}  # fmt: skip
        if names:
            wide[TAKEN] = torch.zeros(state.rows, dtype=torch.int64, device=layer[names[0]].device)
        layers.append(wide)
    return State(layers)


def fill(wide: State, state: State, slots: Slots) -> None:
    """Write ``state`` over ``wide``, of which it takes the first slots; the others are 0, so that nothing of an earlier text is met."""
    for buffers, layer, names in zip(wide.layers, state.layers, slots, strict=True):
        for name, t in layer.items():
            if name in names:
                buffers[name][:, t.shape[1] :].zero_()
                buffers[name][:, : t.shape[1]].copy_(t)
                buffers[TAKEN].fill_(t.shape[1])
            else:
                buffers[name].copy_(t)


def clear(wide: State) -> None:
    """Take no slot: whoever tries what a step does finds room for it."""
    for layer in wide.layers:
        if TAKEN in layer:
            layer[TAKEN].zero_()


def narrowed(wide: State, slots: Slots, used: int) -> State:
    """A copy of what ``wide`` holds, as the model as it is written would have it."""
    return State(
        {
            name: (t[:, :used] if name in names else t).clone(memory_format=torch.contiguous_format)
            for name, t in layer.items()
            if name != TAKEN
        }
        for layer, names in zip(wide.layers, slots, strict=True)
    )


def nbytes(wide: State, slots: Slots, used: int) -> int:
    """Bytes of :func:`narrowed`, which is not made."""
    return sum(
        t.nbytes // t.shape[1] * used if name in names else t.nbytes
        for layer, names in zip(wide.layers, slots, strict=True)
        for name, t in layer.items()
        if name != TAKEN
    )


def _zeros(like: Tensor, size: int) -> Tensor:
    """[rows, size, ...] like [rows, slots, ...]; of [rows, slots, heads, K] the heads come before the slots in memory."""
    if like.ndim != 4:
        return like.new_zeros(like.shape[0], size, *like.shape[2:])
    return like.new_zeros(like.shape[0], like.shape[2], size, like.shape[3]).transpose(1, 2)
