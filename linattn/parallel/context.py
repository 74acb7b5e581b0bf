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
    """Context in which each call computes this process's tokens as a single process computes the whole sequence.

    Every process of the layout's group makes the same calls and backward passes. Initial and final states are those of the whole
    sequences, equal in every process. Gradients are those of the sum of all processes' losses: a tensor that every process holds
    (parameters, constant decays, initial states) gets this process's share of its gradient, as in data parallel training.

    Args:
        layout: the tokens of each process, a :class:`Layout`.

    Raises:
        TypeError: if ``layout`` is not a :class:`Layout`.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a linattn.parallel.Layout, but came as {described(layout)}")
    return sharding.activated(Part(layout))


@dataclass(frozen=True)
class Part:
    """Adapter from a layout to the protocol of operations and mixers, :class:`linattn.ops.sharding.Cut`."""

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

    # A graph break: Python code, which differs between processes, decides what is sent and read.
    @torch.compiler.disable
    def run(self, name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return SHARDED[name](self.layout, op, *args, **kwargs)

    @torch.compiler.disable
    def halo(self, x: Tensor, n: int, old: Tensor | None, returning: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return halo(self.layout, x, n, old, returning)

    @torch.compiler.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, attention: Callable[..., Tensor]) -> Tensor:
        return attend(self.layout, q, k, v, causal, attention)
