"""Plots as inline SVG: styled by classes, so that the style sheet sets light, dark and print colours.

Every series has one style number in all plots: ``s0``, ``s1``, ... give its colour, dash and marker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from linattn.report.language import Words, both, drawn, labelled, sentence
from linattn.report.scales import Scale

WIDTH, HEIGHT = 400, 300  # units: pixels on a phone, where text of 13 is readable
TOP, BOTTOM, LEFT = 26, 42, 58
LEAST = 110  # minimum width of the plotting area
LABEL = 14  # minimum distance of two labels' base lines
STYLES = 10  # styles in the style sheet, used cyclically
CHARACTER = 8.3  # mean width of a character of a label; of WIDE ones half as much again
WIDE = frozenset("mwMW")


@dataclass(frozen=True)
class Series:
    """A line: its name, its points (x, y) in ascending x, and the number of its style."""

    name: Words
    points: Sequence[tuple[float, float]]
    style: int


@dataclass(frozen=True)
class Axis:
    """An axis: its quantity, its unit, and the format of its ticks."""

    label: Words
    scale: Scale
    write: Callable[[float], str]


@dataclass(frozen=True)
class Heading:
    """Accessible name of an image: identifier in the page, title, description; strings for a file in one language."""

    key: str
    title: Words
    description: Words


def lines(heading: Heading, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Lines with markers over two axes; each is named at its right end."""
    names = CHARACTER * max(len(name) + 0.5 * sum(c in WIDE for c in name) for name in (both(s.name).en for s in series))
    width = max(WIDTH, LEFT + LEAST + 17 + names)
    right = width - 17 - names
    height = max(HEIGHT, TOP + BOTTOM + LABEL * len(series))
    frame = _Frame(x, y, right, height)
    return _svg(heading, [*frame.grid(), *(frame.line(s) for s in series), *frame.names(series)], height, "lines", width)


def bars(heading: Heading, values: Sequence[tuple[str, float, int]], write: Callable[[float], Words]) -> str:
    """Horizontal bars from 0, each (name, value, style), the name above and the value after it."""
    step, longest = 44, max(v for _, v, _ in values) or 1.0
    parts = []
    for i, (name, value, style) in enumerate(values):
        top, length = 6 + i * step, max(1.0, (WIDTH - 130) * value / longest)
        parts.append(f'<text class="name" x="2" y="{top + 11}">{escape(name)}</text>')
        parts.append(f'<rect class="s{style % STYLES}" x="2" y="{top + 17}" width="{length:.1f}" height="16" rx="2"/>')
        parts.append(drawn(f'class="name" x="{length + 8:.1f}" y="{top + 29}"', write(value)))
    return _svg(heading, parts, 6 + step * len(values), "bars")


def spread(places: Sequence[float], low: float, high: float, least: float) -> list[float]:
    """Move ``places`` apart to at least ``least`` and into [low, high], in order and as little as possible."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    groups: list[list[float]] = []  # [sum of wanted first places, members]
    for rank in order:
        groups.append([places[rank], 1])
        while len(groups) > 1 and _first(groups[-2], low, high, least) + least * groups[-2][1] > _first(groups[-1], low, high, least):
            total, count = groups.pop()
            groups[-1][0] += total - least * count * groups[-1][1]
            groups[-1][1] += count
    moved = [_first(g, low, high, least) + least * i for g in groups for i in range(int(g[1]))]
    result = [0.0] * len(places)
    for rank, place in zip(order, moved, strict=True):
        result[rank] = place
    return result


def _first(group: list[float], low: float, high: float, least: float) -> float:
    """Position of the first of a group of neighbours, centred on their wanted places and within the bounds."""
    total, count = group
    return max(low, min(total / count, high - least * (count - 1)))


@dataclass(frozen=True)
class _Frame:
    """The rectangle of a line plot; ``right`` is its right edge and ``height`` the height of the whole plot."""

    x: Axis
    y: Axis
    right: float
    height: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        return LEFT + (self.right - LEFT) * self.x.scale(x), self.height - BOTTOM - (self.height - BOTTOM - TOP) * self.y.scale(y)

    def grid(self) -> list[str]:
        parts = [drawn('class="axis" x="2" y="12"', self.y.label)]
        parts.append(drawn(f'class="axis" x="{self.right:.1f}" y="{self.height - 6}" text-anchor="end"', self.x.label))
        parts.append(f'<path class="grid" d="M{LEFT} {self.height - BOTTOM}H{self.right:.1f}"/>')  # the low end may not be a tick
        for value in self.y.scale.ticks:
            _, y = self.at(self.x.scale.low, value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{self.right:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{escape(self.y.write(value))}</text>')
        written = [self.x.write(value) for value in self.x.scale.ticks]
        places = [self.at(value, self.y.scale.low)[0] for value in self.x.scale.ticks]
        every = _apart(places, CHARACTER * max(map(len, written)) + 6)
        for i, (x, name) in enumerate(zip(places, written, strict=True)):
            parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{self.height - BOTTOM + 4}"/>')
            if i % every == 0:
                parts.append(f'<text class="tick" x="{x:.1f}" y="{self.height - BOTTOM + 17}" text-anchor="middle">{escape(name)}</text>')
        return parts

    def line(self, series: Series) -> str:
        places = [self.at(*p) for p in series.points]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        marks = "".join(self._mark(series, p, at) for p, at in zip(series.points, places, strict=True))
        return f'<g class="s{series.style % STYLES}"><path class="line" d="{path}"/>{marks}</g>'

    def _mark(self, series: Series, point: tuple[float, float], at: tuple[float, float]) -> str:
        hint = f"{both(series.name).en}: {self.x.write(point[0])}, {self.y.write(point[1])}"
        return f'<path class="mark" d="{_marker(series.style, *at)}"><title>{escape(hint)}</title></path>'

    def names(self, series: Sequence[Series]) -> list[str]:
        ends = [self.at(*s.points[-1]) for s in series]
        parts = []
        for s, (x, y), place in zip(series, ends, spread([e[1] for e in ends], TOP, self.height - BOTTOM, LABEL), strict=True):
            parts.append(f'<path class="lead s{s.style % STYLES}" d="M{x + 5:.1f} {y:.1f}L{self.right + 8:.1f} {place:.1f}"/>')
            parts.append(drawn(f'class="name s{s.style % STYLES}" x="{self.right + 11:.1f}" y="{place + 4:.1f}"', s.name))
        return parts


def _apart(places: Sequence[float], least: float) -> int:
    """Smallest n for which every n-th of the ascending ``places`` is at least ``least`` from the next."""
    return next(n for n in range(1, len(places) + 1) if all(b - a >= least for a, b in zip(places[::n], places[n::n], strict=False)))


def _marker(style: int, x: float, y: float) -> str:
    """The outline of a marker around (x, y): circle, square, triangle and diamond by turns."""
    shapes = (
        "m-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0-6.4 0z",
        "m-2.9-2.9h5.8v5.8h-5.8z",
        "m0-3.9l3.7 6.6h-7.4z",
        "m0-4.1l4.1 4.1l-4.1 4.1l-4.1-4.1z",
    )
    return f"M{x:.1f} {y:.1f}{shapes[style % len(shapes)]}"


def _svg(heading: Heading, parts: Sequence[str], height: float, kind: str, width: float = WIDTH) -> str:
    size, drawing = f'class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img"', "".join(parts)
    if isinstance(heading.title, str) and isinstance(heading.description, str):
        named = (
            f'<title id="{heading.key}-t">{escape(heading.title)}</title><desc id="{heading.key}-d">{escape(heading.description)}</desc>'
        )
        return f'<svg {size} aria-labelledby="{heading.key}-t {heading.key}-d">{named}{drawing}</svg>'
    return f"<svg {size} {labelled(sentence(heading.title, heading.description))}>{drawing}</svg>"
