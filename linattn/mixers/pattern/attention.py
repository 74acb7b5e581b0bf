"""Base of fixed patterns: softmax attention where :mod:`linattn.ops.pattern` allows, in tiles for a sequence, slot by slot after a
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from linattn.mixers.attention.scores import cached, pieces, softmax
from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.ops.pattern import Pattern, attend

PIECE = 256  # queries per block of scores after a state


class PatternAttention(Softmax):
    """Softmax attention under patterns: a subclass implements :meth:`patterns`, one for each of equal groups of heads.

    Queries and keys have rotary positions unless ``rotary`` is false; the papers add positions to the embedding. State, where causal:
    the last keys and values within the pattern's reach, ``k``, ``v`` [rows, reach, H K]; all of them with their positions where it is
    unbounded. A call that continues from a state attends to all of its slots with a mask.
    """

    packs = False

    def __init__(self, dim: int, heads: int = 4, *, causal: bool = True, rotary: bool = True, bias: bool = False) -> None:
        super().__init__(dim, heads, rotated=None if rotary else 0, bias=bias, out_bias=bias, causal=causal)

    def patterns(self, call: CallContext) -> Sequence[Pattern]:
        """Visibility patterns: one for all heads, or one for each group of them."""
        raise NotImplementedError(f"{type(self).__name__} must implement patterns(call)")

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        found = self.patterns(call)
        if call.fresh:
            if call.returning:
                self._slots(r, call, found)
            return torch.cat([attend(q, k, v, p, lengths=call.lengths) for p, q, k, v in self._grouped(found, r.q, r.k, r.v)], 2)
        k, v, place = self._slots(r, call, found)
        return torch.cat([self._continued(*given, place, call) for given in self._grouped(found, r.q, k, v)], 2)

    def _grouped(self, found: Sequence[Pattern], q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Pattern, Tensor, Tensor, Tensor]]:
        """Pair each pattern with its heads of every tensor [B, T, H, ...]."""
        return list(zip(found, *(t.chunk(len(found), 2) for t in (q, k, v)), strict=True))

    def _continued(self, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, place: Tensor, call: CallContext) -> Tensor:
        """Attend with queries [rows, T, H, K] after a state to slots k, v [rows, slots, H, ...] at ``place`` [rows, slots]."""
        out, position = [], call.positions
        for start, stop in pieces(call.tokens, PIECE):
            seen = pattern.sees(position[:, start:stop, None], place[:, None], 0) & (place >= 0)[:, None]
            seen = seen | ~seen.any(-1, keepdim=True)  # padding after a row's tokens
            scores = torch.einsum("rthk,rshk->rhts", to_float32(q[:, start:stop]), to_float32(k)) * self.size**-0.5
            out.append(softmax(scores, seen, v))
        return torch.cat(out, 1)

    def _slots(self, r: Recurrence, call: CallContext, found: Sequence[Pattern]) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of earlier calls and this one, and their positions [rows, slots], -1 for none; keeps those visible later."""
        reach = self.reach(found)
        if reach is None:
            place = call.positions if call.valid is None else torch.where(call.valid, call.positions, -1)
            slots, _, _ = cached(call, k=r.k, v=r.v, place=place)
            return slots["k"], slots["v"], slots["place"]
        (k, _), (v, _) = (call.context(name, t.flatten(2), reach) for name, t in (("k", r.k), ("v", r.v)))
        place = call.start[:, None] + torch.arange(-reach, call.tokens, device=k.device)
        return k.unflatten(-1, r.k.shape[2:]), v.unflatten(-1, r.v.shape[2:]), place

    def reach(self, found: Sequence[Pattern]) -> int | None:
        """Largest distance back that any head sees; None if unbounded."""
        known = [p.reach for p in found]
        return None if None in known else max(cast("list[int]", known))

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        found = self.patterns(self.begin(*self.arguments(r.v.flatten(2))))
        if past:
            reach = self.reach(found)
            pairs = len(found) * tokens * (tokens + (past if reach is None else min(past, reach)))
        else:
            pairs = sum(pattern.pairs(tokens) for pattern in found)
        return 2 * batch * heads // len(found) * pairs * (size + r.v.shape[3])


def check_groups(name: str, groups: Sequence[object], heads: int) -> None:
    """Raise ValueError if the heads cannot be divided into the groups."""
    if not groups or heads % len(groups):
        raise ValueError(f"the number of {name} must divide the {heads} heads, but they came as {groups!r}")
