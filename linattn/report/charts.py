"""A plot on a report's page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """One plot: its title, a sentence on what it shows, a sentence on what came out, and the SVG."""

    title: str
    meaning: str
    found: str
    svg: str
