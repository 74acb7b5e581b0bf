"""Softmax attention under a pattern: a function of two positions from which attention is drawn, counted and computed.

Patterns are composed: ``(local(64) | strided(64)) & causal()``. :meth:`Pattern.sees` is the definition. :meth:`Pattern.parts` list the
pairs as tiles of queries with shared keys, so that not all n² pairs are computed: each tile gathers its keys, and the softmaxes of a
query with keys in several parts are combined by their denominators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor

from linattn.arguments import whole
from linattn.ops import checks, sharding
from linattn.ops.tiles import Tiles, attention

Way = Literal["auto", "tiles", "flex", "dense"]
LEAST = 64  # minimum of queries per tile, if the pattern allows it


@dataclass(frozen=True)
class Part:
    """Pairs that ``within`` sees and no pattern in ``without`` sees, with tiles that contain them."""

    queries: Tensor  # [G, C]: positions; -1 is none
    keys: Tensor  # [G, M]
    within: Pattern
    without: tuple[Pattern, ...] = ()

    @property
    def pairs(self) -> int:
        return self.queries.shape[0] * self.queries.shape[1] * self.keys.shape[1]

    def seen(self, lengths: Tensor | int) -> Tensor:
        """Mask of the keys that each query sees in its tile, [G, C, M] or, with ``lengths`` [B], [B, G, C, M]."""
        length = lengths[:, None, None, None] if isinstance(lengths, Tensor) else lengths
        query, key = self.queries[:, :, None], self.keys[:, None]
        seen = self.within.sees(query, key, length) & (query >= 0) & (key >= 0) & (key < length)
        return reduce(lambda rest, other: rest & ~other.sees(query, key, length), self.without, seen)


class Pattern(ABC):
    """Set of pairs of tokens (query, key) in a sequence. ``a & b`` is the intersection, ``a | b`` the union."""

    @abstractmethod
    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        """True if the token at position ``query`` sees the one at ``key``, in a sequence of ``length``: int64, broadcast -> bool.

        Implementations must not combine two Python numbers: torch 2.11's compiler of masks supports neither their sum nor a negative.
        """

    @abstractmethod
    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        """Tiles that contain every seen pair among ``length`` tokens once; in each part a query is in at most one tile."""

    @property
    def reach(self) -> int | None:
        """Largest distance to an earlier token that is seen; None if unbounded."""
        return None

    def __and__(self, other: Pattern) -> Pattern:
        return Both(self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return Either(self, other)

    def mask(self, length: int, device: torch.device | None = None) -> Tensor:
        """Mask [T, T] bool of all pairs, rows for queries and columns for keys."""
        token = torch.arange(length, device=device)
        return self.sees(token[:, None], token, length)

    def pairs(self, length: int) -> int:
        """Number of pairs computed: the work of a head is this times 2 (K + V)."""
        return sum(part.pairs for part in self.parts(length, torch.device("meta")))


@dataclass(frozen=True)
class Both(Pattern):
    """Intersection of two patterns."""

    first: Pattern
    second: Pattern

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        return self.first.sees(query, key, length) & self.second.sees(query, key, length)

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        one, other = self.first, self.second
        if other.pairs(length) < one.pairs(length):
            one, other = other, one
        return [Part(p.queries, p.keys, Both(p.within, other), p.without) for p in one.parts(length, device)]

    @property
    def reach(self) -> int | None:
        known = [r for r in (self.first.reach, self.second.reach) if r is not None]
        return min(known, default=None)


@dataclass(frozen=True)
class Either(Pattern):
    """Union of two patterns."""

    first: Pattern
    second: Pattern

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        return self.first.sees(query, key, length) | self.second.sees(query, key, length)

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        rest = [Part(p.queries, p.keys, p.within, (*p.without, self.first)) for p in self.second.parts(length, device)]
        return self.first.parts(length, device) + rest

    @property
    def reach(self) -> int | None:
        first, second = self.first.reach, self.second.reach
        return None if first is None or second is None else max(first, second)


@dataclass(frozen=True)
class Everything(Pattern):
    """Full attention: every token sees all tokens or, if ``causal``, those up to itself."""

    causal: bool = False

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        return key <= query if self.causal else (key == key) & (query == query)

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        every = torch.arange(length, device=device)[None]
        return [Part(every, every, self)]


@dataclass(frozen=True)
class Local(Pattern):
    """Tokens at multiples of ``dilation``, up to ``before`` steps earlier and ``after`` steps later."""

    before: int
    after: int
    dilation: int = 1

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        back = query - key
        if self.dilation == 1:
            return (back <= self.before) & (key - query <= self.after)
        steps = back // self.dilation
        return (steps <= self.before) & (steps + self.after >= 0) & (back % self.dilation == 0)

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        classes = max(min(self.dilation, length), 1)  # tokens with the same residue form a sequence without gaps in the window
        own = -(-length // classes)
        size = max(min(-(-(self.before + self.after) // LEAST) * LEAST or LEAST, own), 1)
        start = torch.arange(0, own, size, device=device)
        first = torch.arange(classes, device=device)[:, None, None]
        tiles = (_runs(start, size, own), _around(start - self.before, size + self.before + self.after, own))
        queries, keys = (torch.where(t < 0, -1, t * self.dilation + first).flatten(0, 1) for t in tiles)
        return [Part(_inside(queries, length), _inside(keys, length), self)]

    @property
    def reach(self) -> int | None:
        return self.before * self.dilation


@dataclass(frozen=True)
class Blocks(Pattern):
    """Tokens of the same block of ``size``, with ``before`` tokens ahead of it and ``after`` tokens behind it."""

    size: int
    before: int = 0
    after: int = 0

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        start = query // self.size * self.size
        return (key >= start - self.before) & (key < start + self.size + self.after)

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        start = torch.arange(0, length, self.size, device=device)
        keys = _around(start - self.before, self.before + self.size + self.after, length)
        return [Part(_runs(start, min(self.size, length), length), keys, self)]

    @property
    def reach(self) -> int | None:
        return self.size - 1 + self.before


@dataclass(frozen=True)
class OtherBlocks(Pattern):
    """Tokens of the block of ``size`` that is ``shift`` blocks later, cyclically (BlockBERT's permutations)."""

    size: int
    shift: int

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        count = -(-length // self.size)
        count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return key // self.size == (query // self.size + self.shift) % count

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        # blocks wrap around to the first ones at a query that depends on the row's length
        ahead = Ahead(self.size, self.shift)
        every, first = torch.arange(length, device=device)[None], torch.arange(min(self.shift * self.size, length), device=device)[None]
        return [*ahead.parts(length, device), Part(every, first, self, (ahead,))]


@dataclass(frozen=True)
class Ahead(Pattern):
    """Tokens of the block that is ``shift`` blocks later, without wrapping around."""

    size: int
    shift: int

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        return key // self.size == query // self.size + self.shift

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        start = torch.arange(0, length, self.size, device=device)
        size = min(self.size, length)
        return [Part(_runs(start, size, length), _runs(start + self.shift * self.size, size, length), self)]


@dataclass(frozen=True)
class Strided(Pattern):
    """Tokens at multiples of ``stride``: on a grid of that width, those of the same column."""

    stride: int

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        return (query - key) % self.stride == 0

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        first = torch.arange(min(self.stride, length), device=device)[:, None]
        column = _inside(first + torch.arange(0, length, self.stride, device=device), length)
        return [Part(column, column, self)]


@dataclass(frozen=True)
class Columns(Pattern):
    """The ``last`` tokens of every block of ``size``, seen by all tokens (summaries of Sparse Transformers' fixed pattern)."""

    size: int
    last: int

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        return (key % self.size + self.last >= self.size) & (query == query)

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        ends = torch.arange(0, length, self.size, device=device)[:, None] + torch.arange(self.size - self.last, self.size, device=device)
        keys = _inside(ends, length)
        return [Part(torch.arange(length, device=device)[None], keys.reshape(1, -1), self)]


@dataclass(frozen=True)
class First(Pattern):
    """The first ``count`` tokens, seen by all tokens, or with ``seeing`` seeing all tokens."""

    count: int
    seeing: bool

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        return ((query if self.seeing else key) < self.count) & (query == query) & (key == key)

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        every = torch.arange(length, device=device)[None]
        few = every[:, : self.count]
        return [Part(few, every, self) if self.seeing else Part(every, few, self)]


@dataclass(frozen=True)
class GridBlocks(Pattern):
    """Tokens of the same block of ``rows`` times ``columns`` on a grid of ``width``, ordered row by row, and of its neighbourhood.

    The neighbourhood has ``above`` rows over the block, ``below`` rows under it, and ``beside`` columns on both sides (Image
    Transformer, 2-D local attention).
    """

    width: int
    rows: int
    columns: int
    above: int = 0
    below: int = 0
    beside: int = 0

    def sees(self, query: Tensor, key: Tensor, length: Tensor | int) -> Tensor:
        top, left = query // self.width // self.rows * self.rows, query % self.width // self.columns * self.columns
        down, right = key // self.width - top, key % self.width - left
        high = (down + self.above >= 0) & (down - self.below < self.rows)
        return high & (right + self.beside >= 0) & (right - self.beside < self.columns)

    def parts(self, length: int, device: torch.device | None = None) -> list[Part]:
        height = -(-length // max(self.width, 1))
        top, left = (torch.arange(0, n, step, device=device) for n, step in ((height, self.rows), (self.width, self.columns)))
        own = _runs(top, min(self.rows, height), height), _runs(left, min(self.columns, self.width), self.width)
        wide = (
            _around(top - self.above, self.above + self.rows + self.below, height),
            _around(left - self.beside, self.columns + 2 * self.beside, self.width),
        )
        return [Part(_inside(self._places(*own), length), _inside(self._places(*wide), length), self)]

    def _places(self, y: Tensor, x: Tensor) -> Tensor:
        """Positions of the tokens in rows y [Gy, a] and columns x [Gx, b], [Gy Gx, a b]."""
        y, x = y[:, None, :, None], x[None, :, None, :]
        return torch.where((y < 0) | (x < 0), -1, y * self.width + x).flatten(2).flatten(0, 1)


def causal() -> Pattern:
    """Pattern of each token and all earlier ones."""
    return Everything(causal=True)


def local(before: int, after: int = 0, dilation: int = 1) -> Pattern:
    """Pattern of each token, ``before`` earlier and ``after`` later ones, ``dilation`` tokens apart (Longformer)."""
    return Local(whole("before", before, 0), whole("after", after, 0), whole("dilation", dilation, 1))


def strided(stride: int) -> Pattern:
    """Pattern of every ``stride``-th token, counted from the query (Sparse Transformer)."""
    return Strided(whole("stride", stride, 1))


def summaries(size: int, last: int = 1) -> Pattern:
    """Pattern of the ``last`` tokens of every block of ``size`` (with ``blocks(size)``, the fixed pattern of Sparse Transformers)."""
    return Columns(whole("size", size, 1), whole("last", last, 1, size))


def blocks(size: int, *, before: int = 0, after: int = 0, shift: int = 0) -> Pattern:
    """Pattern of the token's block of ``size`` with ``before`` tokens ahead and ``after`` behind; or of the block ``shift`` later."""
    whole("size", size, 1)
    for name, value in (("before", before), ("after", after), ("shift", shift)):
        whole(name, value, 0)
    if shift and (before or after):
        raise ValueError(f"shift must be 0 with before or after, but came as {shift} with before = {before} and after = {after}")
    return OtherBlocks(size, shift) if shift else Blocks(size, before, after)


def global_tokens(count: int) -> Pattern:
    """Pattern in which the first ``count`` tokens see all tokens and are seen by all (Longformer)."""
    return First(whole("count", count, 0), seeing=True) | First(count, seeing=False)


@sharding.refuses("a pattern needs pairs of tokens of different processes")
def attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, *, lengths: Tensor | None = None, scale: float | None = None, backend: Way = "auto"
) -> Tensor:
    """Compute softmax attention of q, k [B, T, H, K] and v [B, T, H, V] under ``pattern``: [B, T, H, V].

    Args:
        q, k, v: queries, keys and values.
        pattern: pairs to attend to; a token that sees no token gets 0.
        lengths: [B] int, numbers of real tokens at the front of each row; others are not seen.
        scale: factor of q; K ** -0.5 if None.
        backend: ``"tiles"``: gathered keys, on every device; ``"flex"``: torch's flex_attention, on a GPU; ``"dense"``: the definition, all
            pairs with a mask; ``"auto"``: flex on a GPU if it supports the call, else tiles.

    Raises:
        ValueError: for invalid shapes, dtypes and lengths, and an unknown backend.
        TypeError: for arguments that are not tensors or patterns.
    """
    checks.attended(q, k, v, lengths)
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, such as local(64) or causal(), but came as {type(pattern).__name__}")
    checks.choice("backend", backend, get_args(Way))
    scale = q.shape[3] ** -0.5 if scale is None else checks.number("scale", scale)
    if backend == "flex" or (backend == "auto" and q.is_cuda):
        from linattn.ops import flex  # it takes a second to import

        if backend == "flex" or flex.serves(q, v):
            return flex.attend(q, k, v, pattern, lengths, scale)
    length = q.shape[1]
    parts = Everything().parts(length, q.device) if backend == "dense" else pattern.parts(length, q.device)
    if backend == "dense":
        parts = [Part(p.queries, p.keys, pattern) for p in parts]
    bounds = length if lengths is None else lengths
    return attention(q, k, v, [Tiles(p.queries, p.keys, p.seen(bounds)) for p in parts if p.pairs], scale)


def _runs(start: Tensor, count: int, length: int) -> Tensor:
    """``count`` positions from each of ``start`` [G] on, -1 from ``length`` on."""
    return _inside(start[:, None] + torch.arange(count, device=start.device), length)


def _around(start: Tensor, count: int, length: int) -> Tensor:
    """At most ``length`` of ``count`` positions from each of ``start`` [G] on, with all that exist."""
    count = min(count, length)
    return start.clamp(0, length - count)[:, None] + torch.arange(count, device=start.device)


def _inside(places: Tensor, length: int) -> Tensor:
    return torch.where(places < length, places, -1)


def joined(patterns: Sequence[Pattern]) -> Pattern:
    """Build the union of ``patterns``."""
    return reduce(lambda a, b: a | b, patterns)
