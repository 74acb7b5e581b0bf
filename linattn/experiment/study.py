"""Studies: which runs one wants, how a run is measured, and which table and plots the results make.

The runner, :mod:`linattn.experiment.runner`, knows no study by name: it does the runs and keeps what came out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from linattn.report.charts import Chart
from linattn.report.words import figure

Run = dict[str, Any]  # JSON values: everything that one measurement follows from
Result = dict[str, Any]  # JSON values: what came out
Row = dict[str, Any]  # a line of the table, by the keys of its columns
Done = Sequence[tuple[Run, Result]]


class LeftOut(Exception):
    """A measurement that was not made, and why."""


class Settings(Protocol):
    """The fields that the settings of every study, a frozen dataclass, have; the rest are its own."""

    @property
    def mixers(self) -> tuple[str, ...]: ...  # variants, see linattn.reproduce.variants

    @property
    def seeds(self) -> int: ...  # the runs' seeds are 0 to seeds - 1


@dataclass(frozen=True)
class Column:
    """A column of the table: its key in a row, its heading, and how a value is written; with ``spread`` ± the value of ``key_spread``.

    Where values are ranked, the highest is the best unless ``lower_is_better``.
    """

    key: str
    heading: str
    write: Callable[[Any], str] = str
    spread: bool = False
    lower_is_better: bool = False

    def cell(self, row: Row) -> str:
        """The cell of ``row`` in the table; "–" for what was not measured."""
        value = row.get(self.key)
        if value is None:
            return "–"
        around = row.get(f"{self.key}_spread") if self.spread else None
        return self.write(value) if around is None else f"{self.write(value)} ± {self.write(around)}"


@dataclass(frozen=True)
class Study:
    """A study: one question to the mixers.

    Args:
        title: of its page.
        question: a sentence or two: what is asked and how it is measured.
        quick: settings that two cores do in minutes.
        full: those of the papers, or as near as one GPU gets in an hour.
        runs: all runs that are wanted, given what is done; asked again until it wants nothing new, so that one result can lead to the
            next run.
        measure: does one run, a function of a module, since it may be sent to another process. It may be a generator that yields between
            the steps of a training and returns the result: on a GPU several of these take turns, each on a stream of its own. Raises
            :class:`LeftOut` for what can't be measured.
        rows: the table from the settings and all that is done, with "paper_says" and "source" (None where no paper says anything), and
            "agrees" where what came out can be held against that.
        columns: its columns; those three come after them.
        charts: the plots, from the settings and the rows.
        notes: what was tried where the papers say something else, and what to know before one quotes a figure.
        alone: one run at a time in this process with all its threads: for what measures times.
        strict: whether the error of a run ends all, as it came; else it is written down and the other runs go on. Only with ``alone``.
    """

    title: str
    question: str
    quick: Any
    full: Any
    runs: Callable[[Any, Done], list[Run]]
    measure: Callable[[Run], Result] | Callable[[Run], Generator[None, None, Result]]
    rows: Callable[[Any, Done], list[Row]]
    columns: tuple[Column, ...]
    charts: Callable[[Any, list[Row]], list[Chart]]
    notes: tuple[str, ...] = ()
    alone: bool = False
    strict: bool = False

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """Columns of the study, the papers' claims, and whether they hold here."""
        return (*self.columns, Column("paper_says", "paper says"), Column("source", "source"), Column("agrees", "so here", _yes_or_no))


def shown(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Columns that are not empty in all ``rows``, and the papers' claims."""
    return [c for c in columns if c.key == "paper_says" or any(row.get(c.key) is not None for row in rows)]


def mean_and_spread(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """``{name: mean, name_spread: sample standard deviation}``; None for the spread of one value, and for both of none."""
    known = [v for v in values if v is not None]
    spread = statistics.stdev(known) if len(known) > 1 else None
    return {name: statistics.fmean(known) if known else None, f"{name}_spread": spread}


def grouped(done: Done, *keys: str) -> dict[tuple, list[tuple[Run, Result]]]:
    """Group what is done by the values of ``keys`` in its runs, in the order in which they first came; without what was left out."""
    groups: dict[tuple, list[tuple[Run, Result]]] = {}
    for run, result in done:
        if "left_out" not in result:
            groups.setdefault(tuple(_hashable(run[k]) for k in keys), []).append((run, result))
    return groups


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def share(value: float) -> str:
    """A share as people read it: 0.974."""
    return f"{value:.3f}"


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return figure(value)
