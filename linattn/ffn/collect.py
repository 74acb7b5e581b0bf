"""What feed-forwards have to say of a pass beside its output: losses of their own, and how many tokens found no room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

_open: list[list[Report]] = []  # of the process, the innermost last; a list, since a compiled graph can write to one


@dataclass(frozen=True)
class Report:
    """Of one layer in one pass: ``losses``, weighed already, to be added to that of the model, and ``counts`` of tokens; scalars all."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor | int] = field(default_factory=dict)


@contextmanager
def reports() -> Iterator[list[Report]]:
    """Collect the reports of every pass within: one for each layer that has something to say, in the order of the layers.

    Of one thread: passes of several at a time would be told apart by nothing.
    """
    collected: list[Report] = []
    _open.append(collected)
    try:
        yield collected
    finally:
        _open.pop()


def listening() -> bool:
    """Whether somebody collects."""
    return bool(_open)


def report(losses: dict[str, Tensor], counts: dict[str, Tensor | int]) -> None:
    """Hand a layer's report to whoever collects; nobody does when gradient checkpointing runs the layer again."""
    if _open:
        _open[-1].append(Report(losses, counts))


def added_loss(told: Iterable[Report]) -> Tensor | float:
    """What the reports add to the loss of the model: the sum over the layers, 0.0 where they have none."""
    return sum((loss for r in told for loss in r.losses.values()), 0.0)


def added_counts(told: Iterable[Report]) -> dict[str, Tensor | int]:
    """The counts of all layers added up, by name."""
    total: dict[str, Tensor | int] = {}
    for r in told:
        for name, count in r.counts.items():
            total[name] = total.get(name, 0) + count
    return total
