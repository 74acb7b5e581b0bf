"""Curves from the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linattn.experiment.study import Row
from linattn.report.charts import Chart, line_chart
from linattn.report.plot import Axis, Heading, Series
from linattn.report.scales import Scale, linear, logarithmic
from linattn.report.words import memory_tick, tick
from linattn.reproduce import variants


@dataclass(frozen=True)
class Measure:
    """An axis for a key of the rows: its label, its scale, and the format of its ticks."""

    key: str
    label: str
    scale: Callable[[Sequence[float]], Scale]
    write: Callable[[float], str] = tick


def share_of(key: str, label: str) -> Measure:
    """An axis from 0 to 1."""
    return Measure(key, label, lambda _: linear((0.0, 1.0)))


def in_bytes(key: str, label: str) -> Measure:
    """A logarithmic axis of bytes."""
    return Measure(key, label, lambda values: logarithmic(values, base=2), memory_tick)


def in_tokens(key: str, label: str) -> Measure:
    """A logarithmic axis of tokens or other counts, in powers of two."""
    return Measure(key, label, lambda values: logarithmic(values, base=2))


def curves(
    heading: Heading, rows: Sequence[Row], x: Measure, y: Measure, *, found: str, by: str = "mixer", names: Sequence[str] = ()
) -> Chart | None:
    """A line for each value of ``by``, through the rows that have both values; None where there are none.

    ``names`` are values of ``by`` in the order of the lines' styles, which are thus equal in all charts and tables of a study;
    by default in the order of ``rows``.
    """
    names = list(dict.fromkeys((*names, *(str(row[by]) for row in rows))))
    series = []
    for i, name in enumerate(names):
        points = sorted((row[x.key], row[y.key]) for row in rows if str(row[by]) == name and None not in (row.get(x.key), row.get(y.key)))
        if points:
            series.append(Series(variants.label(name) if by == "mixer" else name, points, i))
    if not series:
        return None
    across, up = ([p[i] for s in series for p in s.points] for i in (0, 1))
    return line_chart(heading, found, series, Axis(x.label, x.scale(across), x.write), Axis(y.label, y.scale(up), y.write))
