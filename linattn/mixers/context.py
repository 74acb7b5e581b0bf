"""Call context of a mixer: positions of its tokens, which of them are real, and the state in and out.

A call has one of three layouts; a mixer is independent of which:

* dense: [B, T, D], every token real;
* ragged: [B, T, D] with ``lengths`` [B]; the first ``lengths[b]`` tokens of row b are real (a mask was sorted into this);
* packed: [1, T, D] with ``cu_seqlens`` [N + 1]; N sequences end to end.

``rows`` is the number of states: B, or N where sequences are packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.ops import tracing
from linattn.ops.checks import tensor
from linattn.ops.one_query import append

State = dict[str, Tensor]


@dataclass(frozen=True)
class Context:
    """Context of a cross mixer: ``tokens`` [B, T, D], real ones first, and which are real, ``valid`` [B, T] (None: all)."""

    tokens: Tensor
    valid: Tensor | None = None


class CallContext:
    """State in, state out and layout of one call. Parts read states by :meth:`get` and write them by :meth:`keep`."""

    sharded = False  # other processes hold the rest of the sequences, see ShardedContext

    def __init__(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        returning: bool = True,
        shared: Tensor | None = None,
        context: Context | None = None,
        grid: tuple[int, int] | None = None,
    ) -> None:
        self.batch, self.tokens = x.shape[:2]
        self.rows = self.batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.lengths, self.cu_seqlens = lengths, cu_seqlens
        self.returning = returning  # the call returns the state after it
        self.shared = shared  # from the previous layer of this kind, real tokens first; may be replaced
        self.across = context  # of a cross mixer; without tokens if the state has already read them
        self.grid = grid  # of a grid mixer: height and width, T = height * width with rows first
        self.new: State = {}
        self._device = x.device
        self.begin(state)

    def begin(self, state: State | None) -> None:
        """Begin from ``state``; None: at the start of every sequence."""
        if state is not None and not isinstance(state, dict):
            raise TypeError(f"state must be a dict of tensors, as an earlier call returned it, but came as {type(state).__name__}")
        self._old = state
        if state is not None and tuple(self.start.shape) != (self.rows,):
            raise ValueError(f"state must have one row a sequence, {self.rows} here, but came with {self.start.shape[0]}")

    @property
    def fresh(self) -> bool:
        """True if the call starts without a state."""
        return self._old is None

    def get(self, name: str) -> Tensor | None:
        """Incoming state ``name``, rows first; None at the start of a sequence."""
        if self._old is None:
            return None
        if name not in self._old:
            raise ValueError(f"state has no {name!r}, only {', '.join(sorted(self._old))}: is it another mixer's?")
        return self._old[name]

    def keep(self, name: str, value: Tensor | None) -> None:
        """Keep ``value``, rows first, as state ``name`` for the next call, if the state is returned."""
        if value is not None and self.returning:
            self.new[name] = value

    @property
    def taken(self) -> Tensor | None:
        """Slots in use, [rows] int64 and equal in all rows, of a preallocated state (:meth:`append`); None if the state grows."""
        return None if self._old is None else self._old.get("taken")

    def append(self, name: str, new: Tensor) -> Tensor:
        """Append ``new`` [rows, T, ...] to the slots kept as ``name``; returns and keeps all of them, [rows, slots, ...].

        In a preallocated state, [rows, capacity, ...] with ``taken`` slots in use, the one token of a step goes into the next slot and
        the shape stays; the caller keeps the new ``taken``.
        """
        old = self.get(name)
        if old is None:
            slots = new
        elif self.taken is None:
            slots = torch.cat([old.to(new.dtype), new], 1)
        else:
            slots = append(old, self.taken[:1], new)
        self.keep(name, slots)
        return slots

    @property
    def valid(self) -> Tensor | None:
        """Mask [B, T] bool, True for real tokens; None if all are."""
        if self.lengths is None:
            return None
        return torch.arange(self.tokens, device=self._device) < self.lengths[:, None]

    @property
    def written(self) -> Tensor | None:
        """Mask :attr:`valid` of the tokens that keys and values come from: the call's own, or the context's."""
        return self.valid if self.across is None else self.across.valid

    @property
    def sequence(self) -> Tensor:
        """Index [T] int64 of each token's sequence, where sequences are packed."""
        assert self.cu_seqlens is not None, "sequences are not packed: every row is one"
        token = torch.arange(self.tokens, device=self._device)
        return torch.searchsorted(self.cu_seqlens[1:].contiguous(), token, right=True)

    @property
    def start(self) -> Tensor:
        """Number of tokens of each row that earlier calls have read, [rows] int64."""
        seen = self.get("position")
        return torch.zeros(self.rows, dtype=torch.int64, device=self._device) if seen is None else seen

    @property
    def counts(self) -> Tensor:
        """Number of real tokens of each row in this call, [rows] int64."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.diff().long()
        if self.lengths is not None:
            return self.lengths
        return torch.full((self.rows,), self.tokens, dtype=torch.int64, device=self._device)

    @property
    def positions(self) -> Tensor:
        """Position of each token in its own sequence, earlier calls included, [B, T] int64."""
        token = torch.arange(self.tokens, device=self._device)
        if self.cu_seqlens is None:
            return self.start[:, None] + token
        n = self.sequence
        return (token - self.cu_seqlens[n] + self.start[n])[None]

    def to_rows(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Lay ``x`` out with one row per sequence, padded by zeros at the end: [rows, T, ...], and a mask [rows, T] (None: all real).

        Packed sequences get T slots each: reading the longest length would synchronise with the device.
        """
        if self.cu_seqlens is None:
            return x, self.valid
        token = torch.arange(self.tokens, device=x.device)
        valid = token < self.counts[:, None]  # [rows, T]
        place = (self.cu_seqlens[:-1, None] + token).clamp(max=max(self.tokens - 1, 0))
        return torch.where(valid.view(*valid.shape, *[1] * (x.ndim - 2)), x[0][place.long()], 0.0), valid

    def from_rows(self, rows: Tensor) -> Tensor:
        """Map [rows, T, ...] back to the layout of the call, [B, T, ...]."""
        if self.cu_seqlens is None:
            return rows
        token = torch.arange(self.tokens, device=rows.device)
        n = self.sequence
        return rows[n, token - self.cu_seqlens[n]][None]

    def context(self, name: str, x: Tensor, n: int) -> tuple[Tensor, Tensor | None]:
        """Put before each sequence of ``x`` [B, T, D] the last ``n`` real tokens kept as ``name`` (zeros at the start).

        Returns the longer sequence and, for packed sequences, the indices of x's own tokens in it; otherwise they are the
        last T. Keeps the last ``n`` real tokens [rows, n, D] as ``name``.
        """
        if self.cu_seqlens is not None:
            old = self._past(name, x, n)
            before = x.new_zeros(self.rows, n, x.shape[-1]) if old is None else old
            return self._packed_context(name, x, before, self.cu_seqlens.long())
        old = self.before(name, x, n)
        return _after(old, x, n), None

    def before(self, name: str, x: Tensor, n: int) -> Tensor | None:
        """Tokens that :meth:`context` puts before each row of ``x``, [B, n, D], for unpacked sequences; None for zeros."""
        assert self.cu_seqlens is None, "packed sequences have a context each, but none before the first token"
        old = self._past(name, x, n)
        if self.returning:
            self.keep(name, self._last(old, x, n))
        return old

    def recorded(self, name: str, x: Tensor) -> Tensor | None:
        """State ``name`` in the dtype of x [B, 1, D], if the call is a step of one token that a step graph records; else None."""
        if not tracing.recording_step() or self.tokens != 1 or self.lengths is not None or not self.returning:
            return None
        old = self.get(name)
        return None if old is None or old.dtype != x.dtype else old

    def _past(self, name: str, x: Tensor, n: int) -> Tensor | None:
        """Tokens that the state holds as ``name``, [rows, n, D] in x's dtype; None without a state."""
        old = self.get(name)
        if old is not None and old.shape[1] != n:
            raise ValueError(f"state must have {name!r} of {n} tokens, but it came with {old.shape[1]}")
        return None if old is None else old.to(x.dtype)

    def shifted(self, x: Tensor, first: Tensor) -> Tensor:
        """Shift x [B, T, D] by one token, each sequence's ``first`` [rows, D] in front."""
        if self.cu_seqlens is None:
            return torch.cat([first[:, None], x], 1)[:, :-1]
        if self.tokens == 0 or self.rows == 0:
            return x
        n = self.sequence
        starts = torch.arange(self.tokens, device=x.device) == self.cu_seqlens[n]
        return torch.where(starts[:, None], first[n], torch.cat([x[:, :1], x[:, :-1]], 1)[0])[None]

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Expand one vector per sequence, [rows, D], to its tokens: [B, 1, D], packed [1, T, D]."""
        return rows[:, None] if self.cu_seqlens is None else rows[self.sequence][None]

    def _last(self, old: Tensor | None, x: Tensor, n: int) -> Tensor:
        """Copy of the last ``n`` real tokens of each row; a view would keep the whole sequence in memory."""
        if self.lengths is not None:
            last = self.lengths[:, None] + torch.arange(n, device=x.device)  # [B, n]
            return _after(old, x, n).gather(1, last[..., None].expand(-1, -1, x.shape[-1]))
        if not torch.compiler.is_compiling() and self.tokens >= n:  # compiled graphs must not depend on the number of tokens
            return x[:, self.tokens - n :].clone()
        return _after(old, x, n)[:, self.tokens :].clone()

    def _packed_context(self, name: str, x: Tensor, before: Tensor, cu: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`context` for packed sequences: before each of N sequences its n kept tokens."""
        n, width = before.shape[1:]
        token = torch.arange(self.tokens, device=x.device)
        row, slot = torch.arange(self.rows, device=x.device)[:, None], torch.arange(n, device=x.device)
        places = token + (self.sequence + 1) * n  # [T]
        longer = x.new_zeros(self.tokens + self.rows * n, width)
        longer = longer.index_copy(0, (cu[:-1, None] + row * n + slot).flatten(), before.flatten(0, 1)).index_copy(0, places, x[0])
        self.keep(name, longer[cu[1:, None] + row * n + slot])  # [N, n, D]: a sequence ends n further than it would without them
        return longer[None], places


def to_front(x: Tensor, mask: Tensor, name: str = "mask") -> tuple[Tensor, Tensor]:
    """Move each row's real tokens of x [B, T, D] to its front, followed by zeros; also returns the order for :func:`from_front`.

    Raises:
        ValueError: if ``mask``, called ``name``, is not torch.bool [B, T].
    """
    if tensor(name, mask, x).shape != x.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(f"{name} must be torch.bool of shape [B, T] = {list(x.shape[:2])}, but came as {mask.dtype} {list(mask.shape)}")
    order = torch.argsort(~mask, dim=1, stable=True)[..., None]  # [B, T, 1]
    real = torch.arange(x.shape[1], device=x.device) < mask.sum(1)[:, None]
    return torch.where(real[..., None], x.gather(1, order.expand_as(x)), 0.0), order


def from_front(y: Tensor, mask: Tensor, order: Tensor) -> Tensor:
    """Move tokens from the front of their rows back to where ``mask`` is true; the others are 0."""
    return torch.where(mask[..., None], torch.zeros_like(y).scatter(1, order.expand_as(y), y), 0.0)


def _after(before: Tensor | None, x: Tensor, n: int) -> Tensor:
    """Concatenate ``before`` [B, n, D], or zeros, and ``x``."""
    return torch.cat([x.new_zeros(x.shape[0], n, x.shape[-1]) if before is None else before, x], 1)
