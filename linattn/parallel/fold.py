"""Exchange of states: one all-gather of each segment's state from an empty start and its transition, and a fold along each sequence.

A segment takes a state S to ``own + link · S``. The link of a recurrence without decay is the identity, that of decays a factor, that
of rules that erase a matrix [K, K]; for a running maximum the product is a sum and the sum a maximum.
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
from linattn.parallel.scan import scan

SCAN_ABOVE = 8  # number of processes above which a scan is faster than an all-gather of all states

Join = Callable[[Tensor, Tensor | None, Tensor], Tensor]  # (own, link, state before) -> state after


def added(own: Tensor, link: Tensor | None, state: Tensor) -> Tensor:
    """Compute ``own + link ⊙ state``; a link of None is 1."""
    return own + (state if link is None else link * state)


def transformed(own: Tensor, link: Tensor | None, state: Tensor) -> Tensor:
    """Compute ``own + link state``, a product of matrices, in float64, which is never rounded to TF32."""
    assert link is not None
    wide = torch.complex128 if state.is_complex() else torch.float64
    return own + (link.to(wide) @ state.to(wide)).to(own.dtype)


def largest(own: Tensor, link: Tensor | None, state: Tensor) -> Tensor:
    """Compute ``max(own, link + state)``."""
    assert link is not None
    return torch.maximum(own, link + state)


@dataclass(frozen=True)
class Recurrence:
    """Passage of an operation's state through a segment.

    Args:
        shape: shape of a state, without rows.
        dtype: dtype of states.
        own: function from segments, as :class:`Rows`, to their states from an empty start, [segments, B, *shape].
        link: shape of a link, and the function from segments to links, [segments, B, ...]; None: the identity.
        join: function from own state, link and state before the segment to the state after it.
        empty: value of a state before the first token.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    own: Callable[[Rows], Tensor]
    link: tuple[tuple[int, ...], Callable[[Rows], Tensor]] | None = None
    join: Join = added
    empty: float = 0.0


class Carried(NamedTuple):
    """States before this process's segments and after the whole sequences, and the gathered tensor.

    ``before`` [segments, B, ...] is None if all are empty; ``final`` [N B, ...] is the last state of every sequence, None unless
    requested; ``gathered`` must be in the graph of every process, see :func:`linattn.parallel.collectives.tie`.
    """

    before: Tensor | None
    final: Tensor | None
    gathered: Tensor | None


def carry(layout: Layout, of: Recurrence, inputs: Sequence[Tensor | None], initial: Tensor | None, *, final: bool) -> Carried:
    """Exchange the states of a call on x [B, T, ...].

    Args:
        layout: the tokens of each process.
        of: the recurrence.
        inputs: all tensors that may need gradients; the first has tokens [B, T, ...] of this process and gives batch and device.
        initial: [N B, ...] for N packed sequences, where B or N is 1, or None.
        final: also return the last states.
    """
    plan, x = layout.exchange(final), inputs[0]
    assert x is not None
    if scanned(layout):
        return _scanned(layout, of, inputs, initial, final=final)
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


def scanned(layout: Layout) -> bool:
    """True if states are exchanged by a scan: many processes, each with one segment of the same rows."""
    return layout.ranks > SCAN_ABOVE and layout.order == "contiguous" and layout.cu_seqlens is None


def whole_parts(layout: Layout) -> bool:
    """True if a few processes have one part of every row each, for kernels with an exchange of their own."""
    return layout.ranks <= SCAN_ABOVE and layout.order == "contiguous" and min(layout.sizes) > 0


def _scanned(layout: Layout, of: Recurrence, inputs: Sequence[Tensor | None], initial: Tensor | None, *, final: bool) -> Carried:
    """:func:`carry` in logarithmically many steps."""
    x = cast(Tensor, inputs[0])
    rows = Rows(layout, tuple(range(len(layout.local))), x.shape[0])
    with no_autocast(x):
        identity = None if of.link is None else _identity(of, x)
        shapes = [of.shape] if of.link is None else [of.shape, of.link[0]]
        own, *links = (x.new_full((x.shape[0], *shape), of.empty, dtype=of.dtype) for shape in shapes)
        if identity is not None:
            links = [identity.expand_as(links[0])]
        if rows.chosen:
            own = of.own(rows).to(of.dtype)[0]
            links = [] if of.link is None else [of.link[1](rows).to(of.dtype)[0].reshape(x.shape[0], *of.link[0])]
        link = links[0] if links else None
        state, before, last, whole = scan(own, link, of.join, (of.empty, identity), [*inputs, initial], layout.group)
        gathered = state
        if initial is not None:
            state, last = of.join(state, before, initial), of.join(last, whole, initial)
    fresh = initial is None and not any(s.link for s in layout.local)
    return Carried(None if fresh else state[None], last if final else None, gathered)


def _identity(of: Recurrence, x: Tensor) -> Tensor:
    """Link of no tokens."""
    assert of.link is not None
    if of.join is transformed:
        return torch.eye(of.link[0][-1], dtype=of.dtype, device=x.device)
    return torch.full((), 0.0 if of.join is largest else 1.0, dtype=of.dtype, device=x.device)


def _first(own: Tensor, *_: Tensor | None) -> Tensor:
    """State after the first segment of a sequence, from an empty start."""
    return own


def _gathered(layout: Layout, plan: Exchange, of: Recurrence, inputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Own states and links [slots, B, ...] of all processes, and the gathered tensor that holds both."""
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
    """Fold by the steps of the plan: the last states [N, B, ...], and the states before this process's segments."""
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
