"""Tokens before each segment, gathered from other processes, for short convolutions, token shifts and windows."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.parallel.collectives import all_gather, tie
from linattn.parallel.layout import Exchange, Layout, Segment


def halo(layout: Layout, x: Tensor, n: int, old: Tensor | None, returning: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Put before each segment of x [B, T, D] the ``n`` tokens before it in its sequence, zeros where there are none.

    Args:
        layout: the tokens of each process.
        x: tokens of this process.
        n: number of tokens before each segment.
        old: [N B, n, D], the tokens before the first of every sequence; None: zeros.
        returning: also return the last ``n`` tokens of every sequence.

    Returns:
        The longer tokens [B, T + segments n, D]; the indices of x's own tokens in it [T], None if they are the last T; and the
        last ``n`` tokens of every sequence [N B, n, D], None unless requested.
    """
    if n == 0:
        none = x.new_zeros(layout.sequences * x.shape[0], 0, x.shape[2]) if returning else None
        return x, None if len(layout.local) < 2 else torch.arange(x.shape[1], device=x.device), none
    plan, batch = layout.exchange(returning), x.shape[0]
    gathered = _tails(layout, plan, x, n, old) if plan.width else None
    pool = [x.new_zeros(1, batch, n, x.shape[2])]  # possible contents before a segment: zeros, old tokens, tails of segments
    pool.append(pool[0].expand(layout.sequences, -1, -1, -1) if old is None else old.to(x.dtype).unflatten(0, (layout.sequences, batch)))
    if gathered is not None:
        pool.append(gathered)
    tokens = torch.cat(pool).transpose(0, 1).flatten(1, 2)  # [B, (1 + N + slots) n, D]
    places = layout.index(f"halo {n} of {plan.name}", lambda: _before(layout, plan, n), x.device)
    found = tokens.index_select(1, places)
    before, last = found[:, : len(layout.local) * n], found[:, len(layout.local) * n :]
    runs = [t for i, s in enumerate(layout.local) for t in (before[:, i * n : (i + 1) * n], x[:, s.own])]
    longer = tie(torch.cat(runs or [x.new_zeros(batch, n, x.shape[2]), x], 1), gathered)
    own = layout.index(f"own behind {n}", lambda: _own(layout, n), x.device) if len(layout.local) > 1 else None
    return longer, own, last.unflatten(1, (layout.sequences, n)).transpose(0, 1).flatten(0, 1) if returning else None


def _own(layout: Layout, n: int) -> Tensor:
    """Indices of this process's tokens after ``n`` tokens are inserted before each segment."""
    return torch.cat([torch.arange(s.length) + s.offset + (i + 1) * n for i, s in enumerate(layout.local)])


def _tails(layout: Layout, plan: Exchange, x: Tensor, n: int, old: Tensor | None) -> Tensor:
    """Gather the last ``n`` tokens of every segment in the plan, padded with zeros in front, [slots, B, n, D]."""
    batch, width = x.shape[0], x.shape[2]
    tails = []
    for i in plan.mine:
        s = layout.local[i]
        few = min(s.length, n)
        tail = x[:, s.own.stop - few : s.own.stop]
        tails.append(torch.cat([x.new_zeros(batch, n - few, width), tail], 1) if few < n else tail)
    tails += [x.new_zeros(batch, n, width)] * (plan.width - len(tails))
    return all_gather(torch.stack(tails), layout.group, (x, old))


def _before(layout: Layout, plan: Exchange, n: int) -> list[int]:
    """Indices in the pool: of the ``n`` tokens before each segment of this process, then of the last ``n`` of every sequence."""
    slots = plan.slots
    chains: dict[int, list[Segment]] = {}
    for s in layout.segments:
        chains.setdefault(s.sequence, []).append(s)

    def walk(sequence: int, stop: int) -> list[int]:
        """Indices of the last ``n`` tokens of the first ``stop`` segments of ``sequence``."""
        found: list[int] = []
        for s in reversed(chains.get(sequence, [])[:stop]):
            first = (1 + layout.sequences + slots[s]) * n
            found += [first + n - 1 - i for i in range(min(s.length, n - len(found)))]
            if len(found) == n:
                break
        old = (1 + sequence) * n
        found += [old + n - 1 - i for i in range(n - len(found))]
        return found[::-1]

    places = [p for s in layout.local for p in walk(s.sequence, s.link)]
    if plan.final:
        places += [p for sequence in range(layout.sequences) for p in walk(sequence, len(chains.get(sequence, [])))]
    return places
