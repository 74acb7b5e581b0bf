"""Reports of feed-forwards on a pass: auxiliary losses, and numbers of tokens beyond the capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

_open: list[list[Report]] = []  # of the process, the innermost last; a list, since a compiled graph can write to one


@dataclass(frozen=True)
class Report:
    """Report of one layer on one pass: weighted ``losses`` to add to the model's, and ``counts`` of tokens; all scalars."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor | int] = field(default_factory=dict)


@contextmanager
def reports() -> Iterator[list[Report]]:
    """Collect the reports of every pass in the context, one for each reporting layer, in the order of the layers.

    Not for concurrent passes in several threads, whose reports would be mixed.
    """
    collected: list[Report] = []
    _open.append(collected)
    try:
        yield collected
    finally:
        _open.pop()


def listening() -> bool:
    """True inside :func:`reports`."""
    return bool(_open)


def report(losses: dict[str, Tensor], counts: dict[str, Tensor | int]) -> None:
    """Pass a layer's report to :func:`reports`; discarded when gradient checkpointing runs the layer again."""
    if _open:
        _open[-1].append(Report(losses, counts))


def added_loss(told: Iterable[Report]) -> Tensor | float:
    """Sum of the reported losses over the layers, 0.0 if there are none."""
    return sum((loss for r in told for loss in r.losses.values()), 0.0)


def added_counts(told: Iterable[Report]) -> dict[str, Tensor | int]:
    """Sum of the counts over the layers, by name."""
    total: dict[str, Tensor | int] = {}
    for r in told:
        for name, count in r.counts.items():
            total[name] = total.get(name, 0) + count
    return total
