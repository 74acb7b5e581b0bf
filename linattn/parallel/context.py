"""The context in which operations, mixers and models work on one process's part of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.arguments import described
from linattn.ops import sharding
from linattn.parallel.attention import attend
from linattn.parallel.halo import halo
from linattn.parallel.layout import Layout
from linattn.parallel.ops import SHARDED


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
    return sharding.activated(Part(layout))


@dataclass(frozen=True)
class Part:
    """A layout as operations and mixers see it, :class:`linattn.ops.sharding.Cut`."""

    layout: Layout

    @property
    def length(self) -> int:
        return self.layout.length

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        return self.layout.cu_seqlens

    def repeated(self, n: int) -> Part:
        return Part(self.layout.repeated(n))

    def counts(self, device: torch.device) -> Tensor:
        return self.layout.counts(device)

    def positions(self, device: torch.device) -> Tensor:
        return self.layout.positions(device)

    def sequence(self, device: torch.device) -> Tensor:
        return self.layout.sequence(device)

    # Compilers leave a graph here: what a process sends and reads is Python's work, and differs from process to process.
    @torch.compiler.disable
    def run(self, name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return SHARDED[name](self.layout, op, *args, **kwargs)

    @torch.compiler.disable
    def halo(self, x: Tensor, n: int, old: Tensor | None, returning: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return halo(self.layout, x, n, old, returning)

    @torch.compiler.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, attention: Callable[..., Tensor]) -> Tensor:
        return attend(self.layout, q, k, v, causal, attention)
