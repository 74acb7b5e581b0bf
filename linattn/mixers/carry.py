"""What one call of a mixer carries besides its tokens: where they stand, which are real, and the state in and out.

A call has one of three layouts, and a mixer need not know which:

* dense: [B, T, D], every token real;
* ragged: [B, T, D] with ``lengths`` [B]; the first ``lengths[b]`` tokens of row b are real (a mask was sorted into this);
* packed: [1, T, D] with ``cu_seqlens`` [N + 1]; N sequences end to end.

``rows`` is the number of states: B, or N where sequences are packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

State = dict[str, Tensor]


class Carry:
    """State in, state out and layout of one call. Parts read with :meth:`get` and write with :meth:`keep`."""

    def __init__(
        self, x: Tensor, state: State | None = None, *, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> None:
        self.batch, self.tokens = x.shape[:2]
        self.rows = self.batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.lengths, self.cu_seqlens = lengths, cu_seqlens
        self._old = state
        self.new: State = {}
        self._device = x.device

    @property
    def fresh(self) -> bool:
        """Whether the call starts without a state."""
        return self._old is None

    def get(self, name: str) -> Tensor | None:
        """The state ``name`` that came in, rows first; None at the start of a sequence."""
        return None if self._old is None else self._old[name]

    def keep(self, name: str, value: Tensor | None) -> None:
        """Hand ``value``, rows first, to the next call."""
        if value is not None:
            self.new[name] = value

    @property
    def valid(self) -> Tensor | None:
        """[B, T] bool, True for real tokens; None where all are."""
        if self.lengths is None:
            return None
        return torch.arange(self.tokens, device=self._device) < self.lengths[:, None]

    @property
    def sequence(self) -> Tensor | None:
        """[T] int64, the sequence of each packed token; None where rows are sequences."""
        if self.cu_seqlens is None:
            return None
        token = torch.arange(self.tokens, device=self._device)
        return torch.searchsorted(self.cu_seqlens[1:].contiguous(), token, right=True)

    @property
    def start(self) -> Tensor:
        """[rows] int64: how many tokens of each row earlier calls have seen."""
        seen = self.get("position")
        return torch.zeros(self.rows, dtype=torch.int64, device=self._device) if seen is None else seen

    @property
    def counts(self) -> Tensor:
        """[rows] int64: how many real tokens this call brings to each row."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff().long()
        if self.lengths is not None:
            return self.lengths
        return torch.full((self.rows,), self.tokens, dtype=torch.int64, device=self._device)

    @property
    def positions(self) -> Tensor:
        """[B, T] int64: position of each token in its own sequence, earlier calls included."""
        token = torch.arange(self.tokens, device=self._device)
        if self.cu_seqlens is None:
            return self.start[:, None] + token
        n = self.sequence
        return (token - self.cu_seqlens[n] + self.start[n])[None]

    def context(self, name: str, x: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
        """Put before each sequence of ``x`` [B, T, D] the last ``n`` real tokens that ``name`` kept (zeros at the start).

        Returns the longer sequence and, where sequences are packed, the places of x's own tokens in it; elsewhere they
        are the last T. Keeps the last ``n`` real tokens [rows, n, D] under ``name``.
        """
        old = self.get(name)
        before = x.new_zeros(self.rows, n, x.shape[-1]) if old is None else old.to(x.dtype)
        if self.cu_seqlens is None:
            longer = torch.cat([before, x], 1)
            if self.lengths is None:
                self.keep(name, longer[:, self.tokens :])
            else:
                last = self.lengths[:, None] + torch.arange(n, device=x.device)  # [B, n]
                self.keep(name, longer.gather(1, last[..., None].expand(-1, -1, x.shape[-1])))
            return longer, None
        places = torch.arange(self.tokens, device=x.device) + (self.sequence + 1) * n  # [T]
        slots = torch.arange(n, device=x.device)
        row = torch.arange(self.rows, device=x.device)[:, None]
        heads = self.cu_seqlens[:-1, None] + row * n + slots  # [N, n]: where the kept tokens go
        longer = x.new_zeros(self.tokens + self.rows * n, x.shape[-1])
        longer = longer.index_copy(0, heads.reshape(-1).long(), before.reshape(-1, x.shape[-1]))
        longer = longer.index_copy(0, places.long(), x[0])
        tails = self.cu_seqlens[1:, None] + (row + 1) * n - n + slots  # [N, n]: the last n tokens of each sequence
        self.keep(name, longer[tails.long()])
        return longer[None], places.long()
