"""The context in which operations, mixers and models work on one process's part of a sequence."""

from __future__ import annotations

from contextlib import AbstractContextManager

from linattn.arguments import described
from linattn.ops import sharding
from linattn.parallel.layout import Layout


def context_parallel(layout: Layout) -> AbstractContextManager[None]:
    """Within it each call computes on this process's tokens what one process computes on the whole.

    Every process of the layout's group makes the same calls, backward passes among them. States that come in and go out are those of
    the whole sequences, equal in every process. Gradients are those of the sum of all processes' losses: what every process
    holds alike (parameters, constant decays, initial states) gets this process's share, as in data parallel training.

    Args:
        layout: who holds which tokens, a :class:`Layout`.

    Raises:
        TypeError: for what is no layout.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a linattn.parallel.Layout, but came as {described(layout)}")
    return sharding.activated(layout)
