"""Interactions of users with items, read from a CSV file or drawn from a Markov chain, whose optimal forecast is known."""

from __future__ import annotations

import csv
import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from linattn.data.sources import left_out

COLUMNS = ("user", "item", "time")
SHOWN = 5  # malformed rows whose line numbers are reported


@dataclass(frozen=True)
class Interactions:
    """History of every user: numbers of items from 0, the earliest first.

    Args:
        histories: for each user the items, [n] int64.
        items: the items' names, by number.
        sha256: hash of the source of the histories.
        bad: number of rows that could not be read.
        bad_lines: the first of their line numbers, from 1.
    """

    histories: list[Tensor]
    items: list[str]
    sha256: str
    bad: int = 0
    bad_lines: list[int] = field(default_factory=list)

    def told(self) -> str:
        """Message about lines left out; empty if there are none."""
        return left_out(self.bad, self.bad_lines, "a line is user,item,time, the time a number or a date")


def read_interactions(path: str | os.PathLike[str]) -> Interactions:
    """Read the interactions in a CSV file with the columns user, item and time.

    The first line that is not blank may name the columns, in any order and among others; without such a line there are these three. A
    time is a number, whole ones of any size kept exactly, or a date by ISO 8601; interactions at the same time keep their order. Rows
    of any other form are skipped and counted.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if no row of it can be read.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file with the columns {','.join(COLUMNS)}")
    content = path.read_bytes()
    taken: dict[str, list[tuple[int | float, str]]] = {}
    bad: list[int] = []
    places, width, first = (0, 1, 2), len(COLUMNS), True
    for number, cells in enumerate(_rows(content), 1):
        if cells == []:
            continue
        named, first = _header(cells) if first and cells is not None else None, False
        if named is not None:
            places, width = named, len(cells or ())
            continue
        row = _parsed(cells, places, width)
        if row is None:
            bad.append(number)
        else:
            user, item, time = row
            taken.setdefault(user, []).append((time, item))
    if not taken:
        raise ValueError(f"{path} has no row of the form user,item,time" + (f"; the first malformed line is {bad[0]}" if bad else ""))
    numbers: dict[str, int] = {}
    histories = []
    for rows in taken.values():
        rows.sort(key=lambda row: row[0])
        histories.append(torch.tensor([numbers.setdefault(item, len(numbers)) for _, item in rows]))
    return Interactions(histories, list(numbers), hashlib.sha256(content).hexdigest(), len(bad), bad[:SHOWN])


def _rows(content: bytes) -> Iterator[list[str] | None]:
    """Cells of each line, empty for a blank one, None for one that is not CSV. An unclosed quote invalidates its own line only."""
    for line in content.removeprefix(b"\xef\xbb\xbf").splitlines():
        try:
            yield next(csv.reader([line.decode()], strict=True), []) if line.strip() else []
        except (csv.Error, UnicodeDecodeError):
            yield None


def _header(cells: Sequence[str]) -> tuple[int, int, int] | None:
    """Column numbers of user, item and time, if ``cells`` names them."""
    names = [cell.strip().lower() for cell in cells]
    if any(names.count(column) != 1 for column in COLUMNS):
        return None
    user, item, time = (names.index(column) for column in COLUMNS)
    return user, item, time


def _parsed(cells: list[str] | None, places: tuple[int, int, int], width: int) -> tuple[str, str, int | float] | None:
    if cells is None or len(cells) != width:
        return None
    user, item, time = (cells[place].strip() for place in places)
    seconds = _seconds(time)
    return (user, item, seconds) if user and item and -math.inf < seconds < math.inf else None


def _seconds(text: str) -> int | float:
    """Parse a number, or convert a date to seconds since 1970 (UTC if it names no time zone); NaN for anything else."""
    for number in (int, float):  # nanoseconds since 1970 exceed a float's precision
        try:
            return number(text)
        except ValueError:
            pass
    try:
        date = datetime.fromisoformat(text)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return math.nan


@dataclass(frozen=True)
class Chain:
    """Markov chain over items: with probabilities ``weights`` the next item follows from the last, the one before, or neither.

    Args:
        last, before: [items, items] float64, probabilities of the next item given the last, and given the one before that.
        popular: [items] float64: probabilities without regard to the past.
        weights: probabilities of the three, sum 1.
    """

    last: Tensor
    before: Tensor
    popular: Tensor
    weights: tuple[float, float, float] = (0.5, 0.4, 0.1)

    @classmethod
    def drawn(cls, items: int, generator: torch.Generator, *, followers: int = 4) -> Chain:
        """Draw a chain in which an item has a few likely followers of halving probability, and popularity falls as 1 / rank."""

        def table() -> Tensor:
            chances = torch.zeros(items, items, dtype=torch.float64)
            likely = torch.rand(items, items, generator=generator, dtype=torch.float64).topk(followers).indices
            halves = 0.5 ** torch.arange(followers, dtype=torch.float64)
            return chances.scatter(1, likely, (halves / halves.sum()).expand(items, -1))

        popular = 1 / (1.0 + torch.randperm(items, generator=generator).double())
        return cls(table(), table(), popular / popular.sum())

    def chances(self, history: Tensor) -> Tensor:
        """Probability of each next item, [N, items] float64, after histories [N, T], T at least 2. No forecast ranks better."""
        a, b, c = self.weights
        return a * self.last[history[:, -1]] + b * self.before[history[:, -2]] + c * self.popular

    def histories(self, users: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw histories [users, length] int64 from the chain; the first two items by popularity."""
        taken = torch.multinomial(self.popular.expand(users, -1), 2, replacement=True, generator=generator)
        while taken.shape[1] < length:
            taken = torch.cat([taken, torch.multinomial(self.chances(taken), 1, generator=generator)], 1)
        return taken


def markov_interactions(users: int = 4000, items: int = 100, length: int = 24, *, seed: int = 0) -> tuple[Interactions, Chain]:
    """Make a synthetic log, equal for equal arguments on every machine, and the chain that it was drawn from.

    Histories have from half of ``length`` to ``length`` items.
    """
    generator = torch.Generator().manual_seed(seed)
    chain = Chain.drawn(items, generator)
    taken = chain.histories(users, length, generator)
    lengths = torch.randint(length // 2, length + 1, (users,), generator=generator).tolist()
    histories = [row[:n].clone() for row, n in zip(taken, lengths, strict=True)]
    digest = hashlib.sha256(torch.cat(histories).to(torch.int32).numpy().tobytes() + torch.tensor(lengths).numpy().tobytes())
    return Interactions(histories, [str(i) for i in range(items)], digest.hexdigest()), chain
