"""A plot on a report's page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from linattn.report.language import Words, both, sentence
from linattn.report.plot import Axis, Heading, Series, lines


@dataclass(frozen=True)
class Chart:
    """A plot: its title, a sentence on what it shows, a sentence on the result, and the SVG."""

    title: Words
    meaning: Words
    found: Words
    svg: str


def line_chart(heading: Heading, found: Words, series: Sequence[Series], x: Axis, y: Axis) -> Chart:
    """Plot lines under ``heading`` in both languages; the sentence ``found`` is its text for screen readers."""
    told = Heading(heading.key, both(heading.title), sentence(heading.description, found))
    x, y = (replace(axis, label=both(axis.label)) for axis in (x, y))
    series = [replace(one, name=both(one.name)) for one in series]
    return Chart(heading.title, heading.description, found, lines(told, series, x, y))
