"""Dispatch of tokens to their experts and back. Choices are [G, S, k]: the expert numbers of k choices for S tokens in G groups."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from linattn.mixers.pattern.learned import ranks


def ragged(x: Tensor, chosen: Tensor, count: int, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Run every token through all of its experts: x [G, S, D] -> [G, S, k, D]; ``run(e, tokens)`` is expert e on tokens [n, D].

    The number of tokens of an expert is data-dependent, so this cannot be part of a compiled full graph.
    """
    tokens, experts, active = x.flatten(0, 1), chosen.flatten(), chosen.shape[-1]
    order = experts.argsort(stable=True)  # copies of the tokens, sorted by expert
    pieces = tokens[order // active].split(experts.bincount(minlength=count).tolist())
    done = torch.cat([run(e, piece) for e, piece in enumerate(pieces) if len(piece)] or [tokens])
    return done[order.argsort()].view(*chosen.shape, x.shape[-1])


def slots(chosen: Tensor, wanted: Tensor, count: int, capacity: int) -> Tensor:
    """Slot of each choice among the slots of all experts, [count, G, capacity] flat; ``count * G * capacity`` for no slot.

    Slots are assigned by choice and then by token: all first choices of a group before all second ones (GShard, algorithm 1).
    ``wanted`` [G, S, k] bool marks the choices to assign.
    """
    groups, length, active = chosen.shape
    expert = torch.where(wanted, chosen, count).transpose(1, 2).flatten(1)  # [G, k S]
    place = ranks(expert, count + 1)
    row = torch.arange(groups, device=chosen.device)[:, None]
    there = (expert < count) & (place < capacity)
    slot = torch.where(there, (expert * groups + row) * capacity + place, count * groups * capacity)
    return slot.unflatten(1, (active, length)).transpose(1, 2)


def slotted(x: Tensor, slot: Tensor, count: int, capacity: int, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Run tokens through the experts that have a ``slot`` [G, S, k] for them, 0 elsewhere: x [G, S, D] -> [G, S, k, D].

    ``run`` is all experts at once on [count, G capacity, D]; a slot without a token is 0. All shapes are static.
    """
    groups, length, active = slot.shape
    token = torch.arange(groups * length, device=x.device).view(groups, length, 1).expand(-1, -1, active)
    holds = token.new_full((count * groups * capacity + 1,), groups * length).scatter(0, slot.flatten(), token.flatten())[:-1]
    rows = _and_zero(x.flatten(0, 1))[holds].view(count, groups * capacity, x.shape[-1])
    return _and_zero(run(rows).flatten(0, 1))[slot]


def _and_zero(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
