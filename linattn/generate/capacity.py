"""Cache capacity of a captured step: its shapes are fixed, so slots for later tokens are preallocated.

Only the step's own buffers have free slots. A state returned by a step has only the slots in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.state import State

TAKEN = "taken"
LEAST = {"cuda": 1024, "cpu": 256}  # minimum of slots: a short text needs one step; capture takes longer on a GPU
AHEAD = 64  # minimum of free slots of a new step

Slots = Sequence[tuple[str, ...]]  # for each layer the names of the tensors with a slot per token


def slots_of(model: Any) -> Slots:
    """Names of the tensors with a slot per token, for each layer of a backbone; empty on devices where no step is captured."""
    here = next(model.parameters()).device.type in LEAST
    return [layer.mixer.growing if here else () for layer in model.layers]


def taken(state: State, slots: Slots) -> int | None:
    """Number of slots in use, the same in every layer that has slots; None if no layer has.

    Raises:
        ValueError: if layers use different numbers of slots: one model cannot have made such a state.
    """
    counts = {layer[name].shape[1] for layer, names in zip(state.layers, slots, strict=True) for name in names}
    if len(counts) > 1:
        raise ValueError(f"layers have different numbers of slots, {min(counts)} and {max(counts)}")
    return next(iter(counts), None)


def slots_for(used: int, tokens: int, device: str) -> int:
    """Cache capacity after ``used`` slots, a power of two: for ``tokens`` more, at most a quarter of ``used`` or :data:`AHEAD`.

    A step on a GPU reads every slot, so the capacity is at most two and a half times the slots needed. With powers of two later texts
    reuse the steps captured for a growing one.
    """
    return max(LEAST[device], 1 << (used + min(tokens, max(used // 4, AHEAD)) - 1).bit_length())


@torch.inference_mode(mode=False)
def preallocated(state: State, slots: Slots, size: int) -> State:
    """Zero buffers for a state like ``state`` with ``size`` slots, none in use. The slots of one head are contiguous in memory."""
    layers = []
    for layer, names in zip(state.layers, slots, strict=True):
        buffers = {name: _zeros(t, size) if name in names else torch.zeros_like(t, memory_format=torch.contiguous_format)
                for name, t in layer.items()}  # fmt: skip
        if names:
            buffers[TAKEN] = torch.zeros(state.rows, dtype=torch.int64, device=layer[names[0]].device)
        layers.append(buffers)
    return State(layers)


def fill(buffers: State, state: State, slots: Slots) -> None:
    """Write ``state`` into the first slots of ``buffers`` and zeros into the others, which overwrites an earlier text."""
    for own, layer, names in zip(buffers.layers, state.layers, slots, strict=True):
        for name, t in layer.items():
            if name in names:
                own[name][:, t.shape[1] :].zero_()
                own[name][:, : t.shape[1]].copy_(t)
                own[TAKEN].fill_(t.shape[1])
            else:
                own[name].copy_(t)


def reset_counters(buffers: State) -> None:
    """Reset the slot counters to 0, so that the warm-up of a step does not exceed the cache capacity."""
    for layer in buffers.layers:
        if TAKEN in layer:
            layer[TAKEN].zero_()


def trimmed(buffers: State, slots: Slots, used: int) -> State:
    """Copy of the state in ``buffers``, cut to the ``used`` slots: the state that the uncaptured model returns."""
    return State(
        {
            name: (t[:, :used] if name in names else t).clone(memory_format=torch.contiguous_format)
            for name, t in layer.items()
            if name != TAKEN
        }
        for layer, names in zip(buffers.layers, slots, strict=True)
    )


def nbytes(buffers: State, slots: Slots, used: int) -> int:
    """Bytes of :func:`trimmed`, computed without the copy."""
    return sum(
        t.nbytes // t.shape[1] * used if name in names else t.nbytes
        for layer, names in zip(buffers.layers, slots, strict=True)
        for name, t in layer.items()
        if name != TAKEN
    )


def _zeros(like: Tensor, size: int) -> Tensor:
    """Zeros [rows, size, ...] for [rows, slots, ...]; for [rows, slots, heads, K] heads come before slots in memory."""
    if like.ndim != 4:
        return like.new_zeros(like.shape[0], size, *like.shape[2:])
    return like.new_zeros(like.shape[0], like.shape[2], size, like.shape[3]).transpose(1, 2)
