"""Call context of a mixer under :func:`linattn.parallel.context_parallel`, with one process's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn.mixers.context import CallContext, State
from linattn.ops.sharding import Cut


class ShardedContext(CallContext):
    """Call context in which states, positions and previous tokens are those of the whole sequences."""

    sharded = True

    def __init__(self, layout: Cut, x: Tensor, state: State | None = None, *, returning: bool = True, shared: Tensor | None = None) -> None:
        super().__init__(x, returning=returning, shared=shared)
        if self.tokens != layout.length:
            raise ValueError(f"x must have this process's {layout.length} tokens under context_parallel, but came with {list(x.shape)}")
        if layout.cu_seqlens is not None and self.batch != 1:
            raise ValueError(f"x must have one row, because the layout packs sequences, but came with {list(x.shape)}")
        self.layout = layout
        self.rows = self.batch if layout.cu_seqlens is None else len(layout.cu_seqlens) - 1
        self.begin(state)

    @property
    def sequence(self) -> Tensor:
        return self.layout.sequence(self._device)

    @property
    def counts(self) -> Tensor:
        """Number of tokens of each row, summed over processes, [rows] int64."""
        return self.layout.counts(self._device).expand(self.rows)

    @property
    def positions(self) -> Tensor:
        own = self.layout.positions(self._device)
        return self.start[:, None] + own if self.layout.cu_seqlens is None else (own + self.start[self.sequence])[None]

    def context(self, name: str, x: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
        old = self.get(name)
        longer, places, last = self.layout.halo(x, n, None if old is None else old.to(x.dtype), self.returning)
        self.keep(name, last)
        return longer, places

    def shifted(self, x: Tensor, first: Tensor) -> Tensor:
        longer, places, _ = self.layout.halo(x, 1, first[:, None], False)
        return longer[:, :-1] if places is None else longer.index_select(1, places - 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, attention: Callable[..., Tensor]) -> Tensor:
        """Compute softmax attention of q [B, T, H, K] to the keys and values of all processes; ``attention`` takes q, k, v and a mask."""
        if self.returning or not self.fresh:
            self.append("k", k)
        return self.layout.attend(q, k, v, causal, attention)

    def append(self, name: str, new: Tensor) -> Any:
        raise NotImplementedError(f"{name!r} grows with the tokens and cannot be returned under context_parallel: call without a state")

    def to_rows(self, x: Tensor) -> Any:
        raise NotImplementedError("no process holds a whole row under context_parallel")

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Expand one vector per sequence, [rows, D], to its tokens: [B, 1, D], packed [1, T, D]."""
        return rows[:, None] if self.layout.cu_seqlens is None else rows[torch.as_tensor(self.sequence)][None]

    from_rows = before = to_rows  # type: ignore[assignment]
