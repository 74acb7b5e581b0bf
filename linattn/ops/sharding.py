"""Calls on one process's part of a sequence: which layout is active, and what an operation does then.

:func:`linattn.parallel.context_parallel` activates a layout. An operation decorated by :func:`shards` then runs the layout's form of it,
and one decorated by :func:`refuses` raises. Under torch's own context parallelism, which knows nothing of states, both raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Op = TypeVar("Op", bound=Callable[..., Any])
_TORCH = "torch.distributed.tensor.experimental._context_parallel._attention"


class Cut(Protocol):
    """A sequence cut into parts that processes hold, as operations and mixers see it: :class:`linattn.parallel.context.Part`."""

    @property
    def length(self) -> int:
        """Tokens of this process."""

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """Borders of the whole's packed sequences; None: every row is one sequence."""

    def run(self, name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the operation ``name``, whose form for one process is ``op``, on this process's tokens."""

    def repeated(self, n: int) -> Cut:
        """The layout in which every token stands for ``n``."""

    def counts(self, device: torch.device) -> Tensor:
        """Tokens of each sequence, [N] int64."""

    def positions(self, device: torch.device) -> Tensor:
        """Place of each of this process's tokens in its sequence, [T] int64."""

    def sequence(self, device: torch.device) -> Tensor:
        """Index of the sequence of each of this process's tokens, [T] int64."""

    def halo(self, x: Tensor, n: int, old: Tensor | None, returning: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Put before each run of tokens the ``n`` before it: the longer tokens, places of x's own in them, the last ``n`` of all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, attention: Callable[..., Tensor]) -> Tensor:
        """Softmax attention of this process's queries to the keys of all; ``attention`` takes q, k, v and a mask."""


_active: Cut | None = None  # a plain global: backward passes recompute checkpointed layers in threads of their own


def active() -> Cut | None:
    """The layout that calls run under; None outside of context parallelism.

    Raises:
        RuntimeError: under torch's own context parallelism.
    """
    if not torch.compiler.is_compiling():
        refuse_torch()
    return _active


def refuse_torch() -> None:
    """Raise RuntimeError under torch's own ``context_parallel``, which cuts tokens but carries no state between processes."""
    module = sys.modules.get(_TORCH)
    if module is not None and F.scaled_dot_product_attention in getattr(module, "_replaced_functions", ()):
        raise RuntimeError(
            "torch's context_parallel carries no state from one process to the next, so a recurrent layer would be wrong: "
            "use linattn.parallel.context_parallel(layout)"
        )


@contextmanager
def activated(layout: Cut | None) -> Iterator[None]:
    """Run calls within under ``layout``; None: as in a single process."""
    global _active
    before, _active = _active, layout
    try:
        yield
    finally:
        _active = before


@contextmanager
def repeated(n: int) -> Iterator[None]:
    """Within it operations take ``n`` tokens for each token of the sequence, as several steps a token are."""
    with activated(_active if _active is None or n == 1 else _active.repeated(n)):
        yield


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under the layout that is active now, whenever it is called: activation checkpointing calls it again in backward."""
    layout = _active
    if layout is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with activated(layout):
            return function(*args, **kwargs)

    return run


def shards(op: Op) -> Op:
    """Decorate a public operation of which :meth:`Cut.run` knows a form for a cut sequence."""

    @wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        layout = active()
        return op(*args, **kwargs) if layout is None else layout.run(op.__name__, op, *args, **kwargs)

    return run  # type: ignore[return-value]


def refuses(why: str) -> Callable[[Op], Op]:
    """Decorate a public operation that has no form for a cut sequence."""

    def decorate(op: Op) -> Op:
        @wraps(op)
        def run(*args: Any, **kwargs: Any) -> Any:
            if active() is not None:
                raise NotImplementedError(f"{op.__name__} does not run under context_parallel: {why}")
            return op(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate
