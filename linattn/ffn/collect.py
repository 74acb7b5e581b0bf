"""What feed-forwards have to say of a pass beside its output: losses of their own, and how many tokens found no room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

_open: ContextVar[list[Report] | None] = ContextVar("reports of feed-forwards", default=None)


@dataclass(frozen=True)
class Report:
    """Of one layer in one pass: ``losses``, weighed already, to be added to that of the model, and ``counts`` of tokens; scalars all."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def reports() -> Iterator[list[Report]]:
    """Collect the reports of every pass within: one for each layer that has something to say, in the order of the layers."""
    collected: list[Report] = []
    token = _open.set(collected)
    try:
        yield collected
    finally:
        _open.reset(token)


def report(losses: dict[str, Tensor], counts: dict[str, Tensor]) -> None:
    """Hand a layer's report to whoever collects; nobody does when gradient checkpointing runs the layer again."""
    collected = _open.get()
    if collected is not None:
        collected.append(Report(losses, counts))
