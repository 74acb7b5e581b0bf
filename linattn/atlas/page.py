"""Page of the site: head, navigation, body, data. It loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from linattn.atlas.text import Both, labelled, spoken
from linattn.report.html import inlined, opening

# The content security policy allows only the site's own script and style sheet.
POLICY = "default-src 'none'; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'; img-src data:"


@dataclass(frozen=True)
class Page:
    """Page with its path in the site, its title, its body, and its data sets by name.

    Args:
        path: such as ``systems/gla.html``; at most one folder deep.
        title: title of the window and of the heading.
        body: HTML below the heading.
        data: data sets of the page's figures: ``<figure data-figure="mask" data-set="gla">`` draws ``data["gla"]``.
        lead: a sentence below the heading.
        heading: shows title and lead above the body.
    """

    path: str
    title: Both
    body: str
    data: Mapping[str, object] = field(default_factory=dict)
    lead: Both | None = None
    heading: bool = True

    @property
    def root(self) -> str:
        """Relative path from this page to the first one's folder."""
        return "../" * self.path.count("/")


@dataclass(frozen=True)
class Entry:
    """Entry of the navigation: its page, its name, and a sentence for the first page."""

    path: str
    name: Both
    summary: Both


def figure(name: str, data: str, *, caption: Both | None = None, label: Both | None = None, kind: str = "") -> str:
    """Element for a figure that the script's function ``name`` draws from the page's data set ``data``."""
    told = f"<figcaption>{spoken(caption)}</figcaption>" if caption else ""
    aria = f" {labelled(label)}" if label else ""
    return f'<figure class="{kind}" data-figure="{name}" data-set="{data}"{aria}>{told}</figure>'


def render(page: Page, entries: Sequence[Entry]) -> str:
    """Render the whole file."""
    sets = "\n".join(f'<script type="application/json" id="data-{escape(k)}">{inlined(v)}</script>' for k, v in page.data.items())
    title = f"{page.title.en} · linattn atlas"
    heading = ""
    if page.heading:
        lead = spoken(page.lead, "p") if page.lead else ""
        heading = f'<header class="opening"><h1>{spoken(page.title)}</h1>{lead}</header>\n'
    return f"""{opening(POLICY)}
<title data-title-en="{escape(title)}" data-title-zh="{escape(page.title.zh)} · linattn 图解">{escape(title)}</title>
<link rel="stylesheet" href="{page.root}atlas.css">
<script defer src="{page.root}atlas.js"></script>
</head>
<body>
<a class="skip" href="#main">{spoken(Both("Skip to the content", "跳到正文"))}</a>
{_navigation(page, entries)}
<main id="main" tabindex="-1">
<noscript><div class="note">{spoken(SCRIPT, "p")}</div></noscript>
{heading}{page.body}
</main>
<footer>{spoken(FOOT, "p")}</footer>
{sets}
</body>
</html>
"""


SCRIPT = Both(
    "The figures and the Chinese text need JavaScript; the English text does not.",
    "图与中文文字要有 JavaScript 才能显示；没有时只能读到英文文字。",
)
FOOT = Both(
    "Numbers were computed by linattn's own ops when this page was built, or in the page; measurements state machine and date.",
    "数字由 linattn 自己的算子在生成本页时算出，或在页内算出；实测数据另注明机器与日期。",
)


def _navigation(page: Page, entries: Sequence[Entry]) -> str:
    links = []
    for entry in entries:
        here = page.path == entry.path or ("/" in entry.path and page.path.startswith(entry.path.partition("/")[0] + "/"))
        current = ' aria-current="page"' if page.path == entry.path else ' aria-current="true"' if here else ""
        links.append(f'<li><a href="{page.root}{entry.path}"{current}>{spoken(entry.name)}</a></li>')
    return (
        f'<nav class="top" {labelled(Both("The atlas", "图解"))}><a class="mark" href="{page.root}index.html">linattn '
        f"{spoken(Both('atlas', '图解'))}</a><ul>{''.join(links)}</ul>"
        '<div class="switches"><button type="button" data-switch="language" lang="zh-Hans" data-other="zh" aria-label="中文">中文</button>'
        '<button type="button" data-switch="theme" '
        f'{labelled(Both("Light or dark", "浅色或深色"))}><span aria-hidden="true">◐</span></button></div></nav>'
    )


def rounded(value: object, digits: int = 3) -> object:
    """Round ``value`` (numbers, nested lists, dictionaries) to ``digits`` significant digits; whole numbers stay.

    Raises:
        ValueError: for a value that JSON cannot hold, such as NaN.
    """
    if isinstance(value, float):
        short = float(f"{value:.{digits}g}")
        json.dumps(short, allow_nan=False)
        return 0 if short == 0 else int(short) if short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, list | tuple):
        return [rounded(v, digits) for v in value]
    if isinstance(value, dict):
        return {k: rounded(v, digits) for k, v in value.items()}
    return value
