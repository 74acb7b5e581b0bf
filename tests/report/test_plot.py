import itertools
import random
import xml.etree.ElementTree as ET

import pytest

from linattn.report.plot import LABEL, STYLES, Axis, Heading, Series, bars, lines, spread
from linattn.report.scales import linear, logarithmic
from linattn.report.words import memory_tick, tick

HEADING = Heading("p", "a <title> & more", "described")
X, Y = Axis("tokens", logarithmic([256, 1024], base=2), tick), Axis("ms", linear([0, 10]), tick)


@pytest.mark.parametrize(
    ("places", "wanted"),
    [
        ([50.0], [50.0]),
        ([10.0, 90.0], [10.0, 90.0]),
        ([50.0, 50.0], [45.0, 55.0]),
        ([50.0, 50.0, 50.0], [40.0, 50.0, 60.0]),
        ([1.0, 1.0], [0.0, 10.0]),
        ([99.0, 99.0], [90.0, 100.0]),
        ([60.0, 40.0], [60.0, 40.0]),
    ],
)
def test_spread(places, wanted):
    assert spread(places, 0, 100, 10) == pytest.approx(wanted)


def test_spread_keeps_distance_bounds_and_order():
    draw = random.Random(0)
    for _ in range(200):
        places = [draw.uniform(0, 100) for _ in range(draw.randint(1, 9))]
        moved = spread(places, 0, 100, 10)
        assert all(-1e-9 <= m <= 100 + 1e-9 for m in moved)
        pairs = sorted(zip(places, moved, strict=True))
        assert all(b[1] - a[1] >= 10 - 1e-9 for a, b in itertools.pairwise(pairs))


def _texts(svg, name):
    return [t for t in ET.fromstring(svg).iter("text") if name in (t.get("class") or "").split()]


def test_lines_are_named_apart_and_styled():
    series = [Series(f"mixer{i}", [(256, 5.0), (1024, 5.0 + 0.01 * i)], i) for i in range(STYLES + 2)]
    svg = lines(HEADING, series, X, Y)
    names = _texts(svg, "name")
    assert [n.text for n in names] == [s.name for s in series]
    assert [n.get("class") for n in names] == [f"name s{i % STYLES}" for i in range(len(series))]
    heights = sorted(float(n.get("y")) for n in names)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= LABEL - 0.11
    assert [t.text for t in _texts(svg, "tick")] == ["0", "2", "4", "6", "8", "10", "256", "512", "1024"]


def test_there_is_room_for_wide_letters_and_for_many_names():
    """An m of the labels' font is 13 units wide, and 40 names exceed the usual height of a plot."""
    svg = ET.fromstring(lines(HEADING, [Series("mamba2 mmmm", [(256, 5.0), (1024, 5.0)], 0)], X, Y))
    name, _, width, height = _texts(ET.tostring(svg), "name")[0], *map(float, svg.get("viewBox").split()[1:])
    assert float(name.get("x")) + 6 * 13 + 5 * 8 <= width
    svg = ET.fromstring(lines(HEADING, [Series(f"mixer{i}", [(256, 5.0), (1024, 5.0)], i) for i in range(40)], X, Y))
    higher = float(svg.get("viewBox").split()[-1])
    heights = sorted(float(n.get("y")) for n in _texts(ET.tostring(svg), "name"))
    assert higher > height and heights[0] > 0 and heights[-1] <= higher


def test_points_lie_where_the_scale_says():
    svg = lines(HEADING, [Series("a", [(256, 0), (512, 5), (1024, 10)], 0)], X, Y)
    path = next(p for p in ET.fromstring(svg).iter("path") if p.get("class") == "line").get("d")
    places = [tuple(map(float, p.split())) for p in path[1:].split("L")]
    assert places[1] == pytest.approx([(a + b) / 2 for a, b in zip(places[0], places[2], strict=True)], abs=0.11)
    assert places[0][1] > places[2][1], "up is more"


@pytest.mark.parametrize(
    "svg", [lines(HEADING, [Series("<a>", [(256, 1)], 0)], X, Y), bars(HEADING, [("<a>", 3.0, 0), ("b", 0.0, 1)], tick)]
)
def test_svg_is_well_formed_and_named(svg):
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    title, desc = root.find("title"), root.find("desc")
    assert title.text == HEADING.title
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert "<a>" in [t.text for t in root.iter("text")]


def test_bars_are_in_proportion():
    rects = [float(r.get("width")) for r in ET.fromstring(bars(HEADING, [("a", 4.0, 0), ("b", 1.0, 1)], tick)).iter("rect")]
    assert rects[0] == pytest.approx(4 * rects[1], rel=0.01)


@pytest.mark.parametrize("ends", [(2**10, 2**16), (2**10, 2**14), (2**10, 2**11)])
def test_ticks_stand_apart(ends):
    """Long labels of bytes are omitted where they would overlap."""
    x = Axis("bytes", logarithmic(ends, base=2), memory_tick)
    ticks = _texts(lines(HEADING, [Series("gated_deltanet beta 2", [(e, 5.0) for e in ends], 0)], x, Y), "tick")[6:]
    assert len(ticks) > 0
    for a, b in itertools.pairwise(ticks):
        assert float(b.get("x")) - float(a.get("x")) >= 7 * (len(a.text) + len(b.text)) / 2


def test_the_part_with_the_lines_is_left_where_names_are_long():
    svg = ET.fromstring(lines(HEADING, [Series("a very long name of a mixer with options", [(256, 5.0), (1024, 5.0)], 0)], X, Y))
    left, right = (float(e.get("x")) for e in (_texts(ET.tostring(svg), "tick")[0], _texts(ET.tostring(svg), "name")[0]))
    assert right - left > 110
