"""List of all systems, family by family, with their matrices; a script searches and filters it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape

from linattn.atlas.draw import mask
from linattn.atlas.families import FAMILY
from linattn.atlas.inspection import Inspection
from linattn.atlas.page import Entry, Page
from linattn.atlas.text import Both, labelled, spoken
from linattn.mixers.taxonomy import FAMILIES, families

LEVELS = 9  # levels of a thumbnail's cell on each side of zero
POSITIVE, NEGATIVE = "0123456789", "0abcdefghi"  # magnitudes, a character each


def index(entry: Entry, inspections: Iterable[Inspection]) -> Page:
    """Make the page that lists ``inspections``."""
    seen = sorted(inspections, key=lambda x: (x.info.year, x.info.name))
    parts = [_filters(seen)]
    for family in FAMILIES:
        members = [x for x in seen if x.family == family]
        if members:
            named = FAMILY[family]
            cards = "".join(map(_card, members))
            parts.append(
                f'<section data-family="{named.key}"><h2 id="{named.key}">{spoken(named.name)}</h2>{spoken(named.about, "p")}'
                f'<ul class="cards systems">{cards}</ul></section>'
            )
    lead = Both(
        f"{len(seen)} systems by family; where an output is a weighted sum of values, the picture shows the weights on one sentence.",
        f"{len(seen)} 种方法，按类别排列；凡输出是值的加权和的，附上同一句话上的权重图。",
    )
    return Page(entry.path, entry.name, "\n".join(parts), lead=lead)


INTRODUCTIONS = {  # published introductions, by the keys in Info.seeds
    "000": ("daodaoning", Both("Daodaoning, at Zhihu (2024, Chinese)", "刀刀宁：简单图解一下线性注意力机制（2024）")),
    "002": ("yuanhao", Both("Yuanhao, on linear attention (2025, Chinese)", "Yuanhao：每周AI观察：线性注意力（2025）")),
    "004": ("overfit", Both("an article at avoid.overfit.cn (Chinese)", "avoid.overfit.cn 的文章")),
}


def _filters(seen: Iterable[Inspection]) -> str:
    """Container for the script's search and filters, with the years of the systems."""
    years = sorted({x.info.year for x in seen if x.info.year}) or [0]
    named = [{"key": key, **words._asdict()} for seed, (key, words) in INTRODUCTIONS.items() if any(seed in x.info.seeds for x in seen)]
    return (
        f'<div class="finder" data-finder data-from="{years[0]}" data-to="{years[-1]}" data-named="{escape(json.dumps(named, ensure_ascii=False))}" '
        f"{labelled(Both('Find a system', '查找方法'))}></div>"
    )


def _card(x: Inspection) -> str:
    kinds = " ".join(FAMILY[family].key for family in families(x.info))
    words = " ".join(dict.fromkeys((x.info.name, x.title.en, x.title.zh, x.info.paper, x.info.arxiv or "", str(x.info.year)))).lower()
    named = " ".join(INTRODUCTIONS[seed][0] for seed in x.info.seeds if seed in INTRODUCTIONS)
    drawn = f'<span class="thumb" data-thumb="{thumbnail(x.matrix[0], x.info.causal)}"></span>' if x.matrix else ""
    return (
        f'<li data-year="{x.info.year}" data-families="{kinds}" data-named="{named}" data-words="{escape(words)}">'
        f'<a class="card small" href="{escape(x.info.name)}.html">'
        f"{drawn}<span>{spoken(x.title, 'b')}<small>{x.info.year or ''} · <code>{_breakable(x.info.name)}</code></small></span></a></li>"
    )


def _breakable(name: str) -> str:
    """Allow line breaks after each underscore of ``name``."""
    return escape(name).replace("_", "_<wbr>")


def thumbnail(matrix: list[list[float]], causal: bool) -> str:
    """Write ``matrix`` row by row, a character per cell: a digit for a positive magnitude, a letter for a negative one."""
    largest = max(abs(value) for row in matrix for value in row) or 1.0
    rows = (row[: i + 1] if causal else row for i, row in enumerate(matrix))
    return " ".join("".join((POSITIVE if v >= 0 else NEGATIVE)[round(LEVELS * abs(v) / largest)] for v in row) for row in rows)


def gallery(inspections: Iterable[Inspection], root: str = "") -> str:
    """Show the first matrices of ``inspections``, with family names and links to their pages; ``root`` is the path to the first page."""
    items = "".join(
        f'<li><a href="{root}systems/{x.info.name}.html">{mask(x, 0)}{spoken(x.title, "b")}{spoken(FAMILY[x.family].name)}</a></li>'
        for x in inspections
        if x.matrix is not None
    )
    return f'<ul class="gallery">{items}</ul>' if items else ""
