"""Context parallelism of operations: the active layout, and decorators for operations with and without a sharded form.

:func:`linattn.parallel.context_parallel` activates a layout. An operation decorated by :func:`shards` then runs its sharded form, and
one decorated by :func:`refuses` raises. Under torch's own context parallelism, which does not exchange states, both raise.
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
    """Protocol of a sequence shared by processes, for operations and mixers: :class:`linattn.parallel.context.Part`."""

    @property
    def length(self) -> int:
        """Tokens of this process."""

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """Boundaries of packed sequences of the whole; None: every row is one sequence."""

    def run(self, name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the operation ``name``, whose single-process form is ``op``, on this process's tokens."""

    def repeated(self, n: int) -> Cut:
        """Layout with ``n`` tokens in the place of each."""

    def counts(self, device: torch.device) -> Tensor:
        """Tokens of each sequence, [N] int64."""

    def positions(self, device: torch.device) -> Tensor:
        """Position of each of this process's tokens in its sequence, [T] int64."""

    def sequence(self, device: torch.device) -> Tensor:
        """Index of the sequence of each of this process's tokens, [T] int64."""

    def halo(self, x: Tensor, n: int, old: Tensor | None, returning: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Prepend the ``n`` previous tokens to each segment: the longer tokens, indices of x's own tokens, the last ``n`` of all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, attention: Callable[..., Tensor]) -> Tensor:
        """Compute softmax attention of this process's queries to all keys; ``attention`` takes q, k, v and a mask."""


class Group(Protocol):
    """Protocol of the processes that each have one part of the same rows, in the order of their ranks, for kernels."""

    @property
    def rank(self) -> int:
        """Number of this process."""

    @property
    def ranks(self) -> int:
        """Number of processes."""

    @property
    def joined(self) -> bool:
        """True if the first sequence of this part begins in an earlier one."""

    @property
    def passes(self) -> bool:
        """True if it also is the only sequence of this part, so that a state passes through."""

    def gather(self, t: Tensor) -> Callable[[], Tensor]:
        """Start to gather ``t`` [M] of every process; the function returned waits for the result [ranks, M]."""


_active: Cut | None = None  # a plain global, because backward passes recompute checkpointed layers in other threads


def active() -> Cut | None:
    """Return the active layout; None outside of context parallelism.

    Raises:
        RuntimeError: under torch's own context parallelism.
    """
    if not torch.compiler.is_compiling():
        refuse_torch()
    return _active


def refuse_torch() -> None:
    """Raise RuntimeError under torch's own ``context_parallel``, which splits tokens but exchanges no states between processes."""
    module = sys.modules.get(_TORCH)
    if module is not None and F.scaled_dot_product_attention in getattr(module, "_replaced_functions", ()):
        raise RuntimeError(
            "torch's context_parallel exchanges no states between processes, so recurrent layers would be wrong: "
            "use linattn.parallel.context_parallel(layout); torch 2.11 stays in its own after an error, so start a new process"
        )


@contextmanager
def activated(layout: Cut | None) -> Iterator[None]:
    """Context in which calls run under ``layout``; None: as in a single process."""
    global _active
    before, _active = _active, layout
    try:
        yield
    finally:
        _active = before


@contextmanager
def repeated(n: int) -> Iterator[None]:
    """Context in which operations take ``n`` tokens for each token of the sequence, as for several steps per token."""
    with activated(_active if _active is None or n == 1 else _active.repeated(n)):
        yield


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Bind ``function`` to the layout that is active now, because activation checkpointing calls it again in the backward pass."""
    layout = _active
    if layout is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with activated(layout):
            return function(*args, **kwargs)

    return run


def shards(op: Op) -> Op:
    """Decorate a public operation that has a sharded form in :meth:`Cut.run`."""

    @wraps(op)
    def run(*args: Any, **kwargs: Any) -> Any:
        layout = active()
        return op(*args, **kwargs) if layout is None else layout.run(op.__name__, op, *args, **kwargs)

    return run  # type: ignore[return-value]


def refuses(why: str) -> Callable[[Op], Op]:
    """Decorate a public operation without a sharded form, so that it raises NotImplementedError with the reason ``why``."""

    def decorate(op: Op) -> Op:
        @wraps(op)
        def run(*args: Any, **kwargs: Any) -> Any:
            if active() is not None:
                raise NotImplementedError(f"{op.__name__} does not run under context_parallel: {why}")
            return op(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate
