"""The exchange of states: one all-gather of what each segment makes from nothing and of its link, and a fold along each sequence.

A segment takes a state S to ``own + link · S``. The link of a recurrence without decay is the identity, that of decays a factor, that
of rules that erase a matrix [K, K]; for a running maximum · is a sum and + the maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from linattn.ops.checks import no_autocast
from linattn.parallel.collectives import all_gather
from linattn.parallel.layout import Exchange, Layout
from linattn.parallel.rows import Rows

Join = Callable[[Tensor, Tensor | None, Tensor], Tensor]  # of own, link and the state before: the state after


def added(own: Tensor, link: Tensor | None, state: Tensor) -> Tensor:
    """``own + link ⊙ state``; a link of None is 1."""
    return own + (state if link is None else link * state)


def transformed(own: Tensor, link: Tensor | None, state: Tensor) -> Tensor:
    """``own + link state``, a product of matrices; in float64, which no card rounds to TF32."""
    assert link is not None
    wide = torch.complex128 if state.is_complex() else torch.float64
    return own + (link.to(wide) @ state.to(wide)).to(own.dtype)


def largest(own: Tensor, link: Tensor | None, state: Tensor) -> Tensor:
    """``max(own, link + state)``."""
    assert link is not None
    return torch.maximum(own, link + state)


@dataclass(frozen=True)
class Recurrence:
    """How an operation's state goes through a segment.

    Args:
        shape: of a state, without its rows.
        own: for segments as :class:`Rows` the states that they make from nothing, [segments, B, *shape].
        link: their links, [segments, B, ...], and the shape of one; None: the identity.
        join: puts the two and a state before together.
        empty: what a state is before the first token.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    own: Callable[[Rows], Tensor]
    link: tuple[tuple[int, ...], Callable[[Rows], Tensor]] | None = None
    join: Join = added
    empty: float = 0.0


class Carried(NamedTuple):
    """States before this process's segments and after the whole, and what was gathered.

    ``before`` [segments, B, ...] is None where all are empty; ``final`` [N B, ...] the last state of every sequence, None unless asked
    for; ``gathered`` has to stay in the graph of every process, see :func:`linattn.parallel.collectives.tie`.
    """

    before: Tensor | None
    final: Tensor | None
    gathered: Tensor | None


def carry(layout: Layout, of: Recurrence, inputs: Sequence[Tensor | None], initial: Tensor | None, *, final: bool) -> Carried:
    """Exchange the states of a call on x [B, T, ...].

    Args:
        layout: who holds what.
        of: the recurrence.
        inputs: all that gradients can reach; the first are tokens [B, T, ...] of this process, for their batch and device.
        initial: [N B, ...] or None; one of N, the number of packed sequences, and B is 1.
        final: whether last states are wanted.
    """
    plan, x = layout.exchange(final), inputs[0]
    assert x is not None
    batch = x.shape[0]
    fresh = initial is None and not any(s.link for s in layout.local)
    with no_autocast(x):
        if initial is None:
            state = x.new_full((len(plan.sequences), batch, *of.shape), of.empty, dtype=of.dtype)
        else:
            rows = layout.index(plan.name, lambda: plan.sequences, x.device)
            state = initial.unflatten(0, (layout.sequences, batch)).index_select(0, rows)
        own, link, gathered, join = None, None, None, of.join
        if plan.width:
            linked = of.link is not None and (plan.chained or initial is not None)
            own, link, gathered = _gathered(layout, plan, of if linked else replace(of, link=None), [*inputs, initial])
            join = join if linked or of.link is None else _first
        state, before = _fold(layout, plan, join, (own, link), state)
    return Carried(None if fresh else before, state.flatten(0, 1) if final else None, gathered)


def _first(own: Tensor, *_: Tensor | None) -> Tensor:
    """The state after a segment that begins its sequence, from nothing."""
    return own


def _gathered(layout: Layout, plan: Exchange, of: Recurrence, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Own states and links [slots, B, ...] of all processes, and both as they were gathered."""
    x = cast(Tensor, inputs[0])
    rows = Rows(layout, plan.mine, x.shape[0])
    makers = [(of.shape, of.own), *([] if of.link is None else [of.link])]
    sizes = [_numel(shape) for shape, _ in makers]
    sent = x.new_zeros(plan.width, rows.batch, sum(sizes), dtype=of.dtype)
    if rows.chosen:
        made = [make(rows).to(of.dtype).reshape(len(rows.chosen), rows.batch, -1) for _, make in makers]
        sent = torch.cat([torch.cat(made, -1), sent[len(rows.chosen) :]])
    gathered = all_gather(sent, layout.group, inputs)
    parts = [t.reshape(*t.shape[:2], *shape) for t, (shape, _) in zip(gathered.split(sizes, -1), makers, strict=True)]
    return parts[0], None if of.link is None else parts[1], gathered


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _fold(
    layout: Layout, plan: Exchange, join: Join, sent: tuple[Tensor | None, Tensor | None], state: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Last states [N, B, ...] as far as the plan goes, and those before this process's segments."""
    own, link = sent
    before: dict[int, Tensor] = {}
    for n, step in enumerate(plan.steps):
        for i, row in step.local:
            before[i] = state[row]
        if not step.slots or own is None:
            continue
        slots, rows = (
            layout.index(f"{name} {n} of {plan.name}", lambda values=values: values, state.device)  # type: ignore[misc]
            for name, values in (("slots", step.slots), ("rows", step.rows))
        )
        after = join(own.index_select(0, slots), None if link is None else link.index_select(0, slots), state.index_select(0, rows))
        state = state.index_copy(0, rows, after)
    return state, torch.stack([before[i] for i in range(len(before))]) if before else None
