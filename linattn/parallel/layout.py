"""Assignment of the tokens of a sequence to the processes that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from linattn.arguments import described, whole
from linattn.ops import checks
from linattn.parallel.collectives import all_gather

ORDERS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence in one process: ``start`` to ``stop`` of the whole, at ``offset`` in the process."""

    sequence: int
    start: int
    stop: int
    rank: int
    offset: int
    link: int  # index of the segment in its sequence

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def own(self) -> slice:
        """Slice of the process's tokens."""
        return slice(self.offset, self.offset + self.length)


@dataclass(frozen=True)
class Step:
    """Step of the fold along sequences: ``rows`` of states advance by the contents of ``slots``; ``local`` segments start before it."""

    local: tuple[tuple[int, int], ...]  # (segment of this process, row of its sequence)
    rows: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """Plan of one all-gather of states: ``width`` slots of each process, of which this process fills those of ``mine``."""

    name: str
    final: bool
    slots: dict[Segment, int]  # of all processes
    sequences: tuple[int, ...]  # sequences whose states are computed
    mine: tuple[int, ...]  # segments of this process
    width: int
    chained: bool  # True if a sent segment has a predecessor
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Layout:
    """A sequence of ``tokens``, cut into parts that the processes of ``group`` hold; made by :meth:`of`.

    Args:
        group: the processes.
        rank: this process's number in it.
        tokens: length of the whole sequence.
        parts: for each process the runs of tokens (start, stop) that it holds, in their order there.
        cu_seqlens: boundaries of packed sequences [N + 1]; None: every row is one sequence.
        order: order given to :meth:`of`.
    """

    group: dist.ProcessGroup
    rank: int
    tokens: int
    parts: tuple[tuple[tuple[int, int], ...], ...]
    cu_seqlens: tuple[int, ...] | None
    order: str
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh | dist.ProcessGroup,
        tokens: int,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        order: str = "contiguous",
        sizes: Sequence[int] | None = None,
    ) -> Layout:
        """Cut a sequence of ``tokens`` among the processes of ``mesh``.

        Args:
            mesh: one-dimensional, or a process group; every process of it calls this with the same arguments.
            tokens: length of the whole sequence, the same in all rows of a batch.
            cu_seqlens: [N + 1] int, boundaries of packed sequences, which may span several processes.
            order: ``"contiguous"``: process i holds the i-th part; ``"zigzag"``: process i holds the i-th and the i-th last of twice
                as many parts, which balances the work of causal softmax attention.
            sizes: tokens of each process, zeros allowed; None: as equal as possible. Under ``"zigzag"`` each is halved, and the
                first half is the longer one.

        Raises:
            ValueError: naming the argument, what came and what was wanted.
        """
        group = _group(mesh)
        whole("tokens", tokens, 0)
        checks.choice("order", order, ORDERS)
        ranks = group.size()
        lengths = _lengths(tokens, sizes, ranks, order)
        borders = list(accumulate(lengths, initial=0))
        runs = list(pairwise(borders))
        parts = [(run,) for run in runs] if order == "contiguous" else [(runs[i], runs[-1 - i]) for i in range(ranks)]
        return cls(group, group.rank(), tokens, tuple(parts), _borders(cu_seqlens, tokens), order)

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return len(self.parts)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each process."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.parts)

    @property
    def length(self) -> int:
        """Tokens of this process."""
        return self.sizes[self.rank]

    @property
    def sequences(self) -> int:
        """Number of packed sequences; 1 if every row is one."""
        return 1 if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def borders(self) -> tuple[int, ...]:
        """Boundaries of sequences, [N + 1]."""
        return (0, self.tokens) if self.cu_seqlens is None else self.cu_seqlens

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, in the order of the whole sequence."""
        held = []
        for rank, runs in enumerate(self.parts):
            offset = 0
            for start, stop in runs:
                held.append((start, stop, rank, offset))
                offset += stop - start
        found: list[Segment] = []
        held.sort()
        for n, (first, last) in enumerate(pairwise(self.borders)):
            link = 0
            for start, stop, rank, offset in held:
                a, b = max(start, first), min(stop, last)
                if a < b:
                    found.append(Segment(n, a, b, rank, offset + a - start, link))
                    link += 1
        return tuple(found)

    @cached_property
    def local(self) -> tuple[Segment, ...]:
        """Segments of this process, in the order of its tokens."""
        return tuple(s for s in self.segments if s.rank == self.rank)

    def exchange(self, final: bool) -> Exchange:
        """Plan the exchange of states; ``final``: include the last state of every sequence, in every process."""
        if ("exchange", final) not in self._memo:
            self._memo["exchange", final] = _exchange(self, final)
        found: Exchange = self._memo["exchange", final]
        return found

    def repeated(self, n: int) -> Layout:
        """Layout with ``n`` tokens in the place of each."""
        if ("repeated", n) not in self._memo:
            parts = tuple(tuple((n * a, n * b) for a, b in runs) for runs in self.parts)
            cu = None if self.cu_seqlens is None else tuple(n * c for c in self.cu_seqlens)
            self._memo["repeated", n] = Layout(self.group, self.rank, n * self.tokens, parts, cu, self.order)
        found: Layout = self._memo["repeated", n]
        return found

    def index(self, name: str, values: Callable[[], Iterable[int] | Tensor], device: torch.device) -> Tensor:
        """Integer tensor ``values`` on ``device``, cached under ``name``."""
        key = ("index", name, device)
        if key not in self._memo:
            found = values()
            self._memo[key] = (found if isinstance(found, Tensor) else torch.tensor(list(found), dtype=torch.int64)).to(device)
        made: Tensor = self._memo[key]
        return made

    def counts(self, device: torch.device) -> Tensor:
        """Tokens of each sequence, [N] int64."""
        return self.index("counts", lambda: (b - a for a, b in pairwise(self.borders)), device)

    def positions(self, device: torch.device) -> Tensor:
        """Position of each of this process's tokens in its sequence, [T] int64."""
        return self.index("positions", lambda: _joined(self.local, lambda s: _from(s.start - self.borders[s.sequence], s.length)), device)

    def sequence(self, device: torch.device) -> Tensor:
        """Index of the sequence of each of this process's tokens, [T] int64."""
        return self.index("sequence", lambda: _joined(self.local, lambda s: torch.full((s.length,), s.sequence)), device)

    def shard(self, t: Tensor, dim: int) -> Tensor:
        """Select this process's tokens from ``t``, which has all tokens along ``dim``.

        Raises:
            ValueError: unless ``t`` has the layout's number of tokens there.
        """
        dim = self._along("t", t, dim, self.tokens, "tokens of the whole sequence")
        runs = [t.narrow(dim, start, stop - start) for start, stop in self.parts[self.rank]]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim)

    def gather(self, t: Tensor, dim: int) -> Tensor:
        """Gather every process's ``t`` along ``dim`` into all tokens, in the order of the whole sequence.

        The gradient is that of the sum of all processes' losses.

        Raises:
            ValueError: unless ``t`` has this process's number of tokens there.
        """
        dim = self._along("t", t, dim, self.length, "tokens of this process")
        own, longest = t.movedim(dim, 0), max(self.sizes)
        if own.shape[0] < longest:
            own = torch.cat([own, own.new_zeros(longest - own.shape[0], *own.shape[1:])])
        if not longest:
            return t
        return all_gather(own, self.group, (t,)).index_select(0, self.index("gather", self._places, t.device)).movedim(0, dim)

    def _places(self) -> Tensor:
        """Index of each token of the whole sequence in the gathered, padded shards, [tokens]."""
        longest, ordered = max(self.sizes), sorted(self.segments, key=lambda s: s.start)
        return _joined(ordered, lambda s: _from(s.rank * longest + s.offset, s.length))

    def _along(self, name: str, t: Tensor, dim: int, wanted: int, what: str) -> int:
        """Non-negative ``dim``, after checking that ``t`` has ``wanted`` entries along it."""
        if not -checks.tensor(name, t).ndim <= dim < t.ndim:
            raise ValueError(f"dim must be one of the {t.ndim} dimensions of {name}, but came as {dim}")
        if t.shape[dim] != wanted:
            raise ValueError(f"{name} must have the {wanted} {what} along dim {dim}, but came with {list(t.shape)}")
        return dim % t.ndim


def _group(mesh: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or a process group, but came as {described(mesh)}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, for the processes that share a sequence, but came with {mesh.ndim}")
    return mesh.get_group()


def _lengths(tokens: int, sizes: Sequence[int] | None, ranks: int, order: str) -> list[int]:
    """Lengths of the parts in the order of the whole sequence."""
    count = ranks if order == "contiguous" else 2 * ranks
    if sizes is None:
        return [tokens // count + (i < tokens % count) for i in range(count)]
    if len(sizes) != ranks or sum(sizes) != tokens:
        raise ValueError(f"sizes must be {ranks} lengths, one per process, with the sum tokens = {tokens}, but came as {list(sizes)}")
    for i, size in enumerate(sizes):
        whole(f"sizes[{i}]", size, 0)
    return list(sizes) if order == "contiguous" else [*((s + 1) // 2 for s in sizes), *(s // 2 for s in reversed(sizes))]


def _borders(cu_seqlens: Tensor | Sequence[int] | None, tokens: int) -> tuple[int, ...] | None:
    if cu_seqlens is None:
        return None
    borders = tuple(map(int, cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens))
    if not borders or borders[0] != 0 or borders[-1] != tokens or any(a > b for a, b in pairwise(borders)):
        raise ValueError(f"cu_seqlens must rise from 0 to tokens = {tokens} and never fall, but came as {list(borders)[:9]}")
    return borders


def _from(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count)


def _joined(segments: Sequence[Segment], each: Callable[[Segment], Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *map(each, segments)])


def _exchange(layout: Layout, final: bool) -> Exchange:
    count = [0] * layout.sequences  # segments of each sequence
    for s in layout.segments:
        count[s.sequence] += 1
    sent, filled = [], [0] * layout.ranks
    for s in layout.segments:
        if final or s.link < count[s.sequence] - 1:
            sent.append((s, filled[s.rank]))
            filled[s.rank] += 1
    width = max(filled)
    slots = {s: s.rank * width + i for s, i in sent}
    followed = sorted(range(layout.sequences) if final else {s.sequence for s in layout.local})
    row = {sequence: i for i, sequence in enumerate(followed)}
    ahead = max([s.link for s in layout.local], default=0)  # without final states the fold ends at this link
    chains: list[list[Segment]] = [[] for _ in range(max(count, default=0))]
    for s in layout.segments:
        if s.sequence in row:
            chains[s.link].append(s)
    place = {s: i for i, s in enumerate(layout.local)}
    steps = []
    for link, at in enumerate(chains):
        local = tuple((place[s], row[s.sequence]) for s in at if s in place)
        moved = [s for s in at if s in slots and (final or link < ahead)]
        steps.append(Step(local, tuple(row[s.sequence] for s in moved), tuple(slots[s] for s in moved)))
    mine = tuple(i for s, i in place.items() if s in slots)
    return Exchange(f"exchange {final}", final, slots, tuple(followed), mine, width, any(s.link for s in slots), tuple(steps))
