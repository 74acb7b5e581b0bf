"""A plot on a report's page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from linattn.report.plot import Axis, Heading, Series, lines


@dataclass(frozen=True)
class Chart:
    """A plot: its title, a sentence on what it shows, a sentence on the result, and the SVG."""

    title: str
    meaning: str
    found: str
    svg: str


def line_chart(heading: Heading, found: str, series: Sequence[Series], x: Axis, y: Axis) -> Chart:
    """Plot lines under ``heading``; screen readers also read the sentence ``found``."""
    told = replace(heading, description=f"{heading.description} {found}")
    return Chart(heading.title, heading.description, found, lines(told, series, x, y))
