"""Studies: the runs to execute, their measurement, and the table and plots of the results.

The runner, :mod:`linattn.experiment.runner`, executes any study and saves the results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from linattn.report.charts import Chart
from linattn.report.words import figure

Run = dict[str, Any]  # JSON values: everything that determines a measurement
Result = dict[str, Any]  # JSON values: the measured figures
Row = dict[str, Any]  # a line of the table, by the keys of its columns
Done = Sequence[tuple[Run, Result]]


class LeftOut(Exception):
    """Reason why a measurement was skipped."""


class Settings(Protocol):
    """Common fields of the settings of studies, which are frozen dataclasses with further fields."""

    @property
    def mixers(self) -> tuple[str, ...]: ...  # variants, see linattn.reproduce.variants

    @property
    def seeds(self) -> int: ...  # the runs' seeds are 0 to seeds - 1


@dataclass(frozen=True)
class Column:
    """Column of a table: its key in a row, its heading, and the format of a value; with ``spread`` ± the value of ``key_spread``.

    In rankings the highest value is the best unless ``lower_is_better``.
    """

    key: str
    heading: str
    write: Callable[[Any], str] = str
    spread: bool = False
    lower_is_better: bool = False

    def cell(self, row: Row) -> str:
        """Format the cell of ``row``; "–" for missing values."""
        value = row.get(self.key)
        if value is None:
            return "–"
        around = row.get(f"{self.key}_spread") if self.spread else None
        return self.write(value) if around is None else f"{self.write(value)} ± {self.write(around)}"


@dataclass(frozen=True)
class Study:
    """Study: one question about the mixers.

    Args:
        title: title of its page.
        question: the question and the method, in a few sentences.
        quick: settings for minutes on two cores.
        full: settings of the papers, or the closest that one GPU runs in an hour.
        runs: function from the finished runs to all requested runs; called until it requests nothing new, so that results can determine
            further runs.
        measure: function of a module, for use in other processes, that executes a run. It may be a generator that yields between
            training steps and returns the result; on a GPU several of these alternate, each on its own stream. Raises
            :class:`LeftOut` to skip a measurement.
        rows: function from the settings and the finished runs to the table, with "paper_says" and "source" (None without a published
            claim), and "agrees" if the result can be compared with the claim.
        columns: columns of the table, which precede these three.
        charts: function from the settings and the rows to the plots.
        notes: experiments on results that differ from the papers, and caveats.
        alone: run one at a time in this process with all its threads, for measurements of time.
        strict: raise errors of runs; otherwise they are recorded and other runs continue. Only with ``alone``.
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
        """Columns of the study, of the papers' claims, and of their agreement with the results."""
        return (*self.columns, Column("paper_says", "paper says"), Column("source", "source"), Column("agrees", "so here", _yes_or_no))


def shown(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Columns that are not empty in all ``rows``."""
    return [c for c in columns if any(row.get(c.key) is not None for row in rows)]


def mean_and_spread(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """Compute ``{name: mean, name_spread: sample standard deviation}``; the spread of one value is None, as are both of no values."""
    known = [v for v in values if v is not None]
    spread = statistics.stdev(known) if len(known) > 1 else None
    return {name: statistics.fmean(known) if known else None, f"{name}_spread": spread}


def grouped(done: Done, *keys: str) -> dict[tuple, list[tuple[Run, Result]]]:
    """Group the finished runs by the values of ``keys``, in order of first occurrence, without skipped ones."""
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
    """Format a share with three digits: 0.974."""
    return f"{value:.3f}"


def number(value: float) -> str:
    """Format a number with three digits, without an exponent."""
    return figure(value)
