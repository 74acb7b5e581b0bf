"""Drawing of one generation step, and a page with the drawing and the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from linattn.atlas.svg import alone, drawing, text, wire
from linattn.atlas.text import CODES, Both
from linattn.generate.walkthrough import Stage, Token, Walkthrough
from linattn.report.html import opening
from linattn.report.language import HIDES, SWITCH, policy, script, spoken
from linattn.report.walkthrough import TITLES, ended, how, largest, lines, logits, name_of, quoted, shape, told
from linattn.report.words import percent

ROW = 34
CELL = 9  # size of a strip's cell, which shows the largest magnitude of neighbouring channels
CHIP = 7.8  # mean width of a character


@dataclass(frozen=True)
class Layout:
    """Sizes of a drawing: width, start and cells of strips, and length of a bar of 100 %; ``below``: strips are below their names."""

    width: int
    left: int
    cells: int
    bar: int
    below: bool = False

    @property
    def head(self) -> int:
        """Height of a name above its strip."""
        return 24 if self.below else 0


BROAD, NARROW = Layout(980, 190, 48, 360), Layout(400, 14, 40, 160, below=True)


def svg(walk: Walkthrough, language: str = "en") -> str:
    """Draw the step as an SVG file with text in ``language``."""
    return alone(_drawn(walk), language)


def page(walk: Walkthrough) -> str:
    """Make a self-contained page in English and Chinese."""
    title = Both(f"From text to text: {quoted(walk.prompt)}", f"从文本到文本：{quoted(walk.prompt)}")
    pictures = "".join(
        f'<div lang="{code}" class="{kind}">{alone(_drawn(walk, layout), key).partition(chr(10))[2]}</div>'
        for key, code in CODES.items()
        for kind, layout in (("broad", BROAD), ("narrow", NARROW))
    )
    figures = "".join(f'<pre tabindex="0" lang="{c}">{escape(chr(10).join(lines(walk, k)))}</pre>\n' for k, c in CODES.items())
    return f"""{opening(policy())}
<title data-title-en="{escape(title.en)} · linattn" data-title-zh="{escape(title.zh)} · linattn">{escape(title.en)} · linattn</title>
<style>
{HIDES}
:root {{ color-scheme: light; }}
body {{ margin: 1.5rem auto; padding: 0 1rem; max-width: 1240px; background: #fff; color: #1b1f24; font-family: sans-serif; }}
.switches {{ text-align: right; }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere; }}
svg {{ display: block; width: 100%; height: auto; }}
@media (min-width: 761px) {{ .narrow {{ display: none; }} .broad text.shape {{ font-size: 12.6px; }} }}
@media (max-width: 760px) {{ .broad {{ display: none; }} .narrow text.shape, .narrow text.tick {{ font-size: 13px; }} }}
pre {{ overflow-x: auto; padding: .8rem; background: #f6f8fa; border-radius: 8px; font-size: .82rem; }}
</style>
</head>
<body>
<main>
<div class="switches">{SWITCH}</div>
<h1>{spoken(title)}</h1>
{pictures}<h2>{spoken(Both("The same in figures", "同样内容的数字"))}</h2>
{figures}</main>
<script>{script()}</script>
</body>
</html>
"""


def _drawn(walk: Walkthrough, layout: Layout = BROAD) -> str:
    """Draw from top to bottom: tokens, a strip for every stage, the candidates, the loop."""
    parts: list[str] = []
    left, width, y = layout.left, layout.width, 20.0
    y = _add(parts, *_chips(TITLES["tokenise"], walk.tokens, y, layout))
    for stage in walk.stages[:-1]:
        title = {"embedding": TITLES["embedding"], "norm": Both("norm", "归一化")}.get(stage.part) or name_of(stage)
        if not layout.below:
            parts.append(wire([(left - 12, y - 12), (left - 12, y + 6)]))
        y = _add(parts, _strip(stage, title, y, layout), y + ROW + (58 if layout.below else 0) + (14 if told(stage) else 0))
    y = _add(parts, *_candidates(walk, y + 8, layout))
    y = _add(parts, *_chips(TITLES["loop"], walk.written, y + 8, layout))
    parts.append(text(left, y, Both(f"ended {ended(walk).en}", ended(walk).zh), "tick", "start"))
    if not layout.below:
        parts.append(wire([(width - 26, y - 33), (width - 10, y - 33), (width - 10, 31), (width - 26, 31)], dashed=True))
    label = Both(f"One step of a generation after {quoted(walk.prompt)}", f"{quoted(walk.prompt)} 之后的一步生成")
    return drawing(width, y + 16, parts, label, "cells")


def _add(parts: list[str], drawn: str, y: float) -> float:
    parts.append(drawn)
    return y


def _chips(title: Both, tokens: Sequence[Token], y: float, layout: Layout) -> tuple[str, float]:
    """Draw tokens in boxes, line after line, and return the next free y; of many the first and the last."""
    parts, x = [text(8, y + 15, title, "name", "start")], float(layout.left)
    y += layout.head
    for word in _words(tokens):
        width = CHIP * len(word) + 12
        if x + width > layout.width - (8 if layout.below else 40):
            x, y = float(layout.left), y + 28
        parts.append(f'<g class="tk"><rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="22" rx="5"/></g>')
        parts.append(text(x + width / 2, y + 15, word))
        x += width + 5
    return "".join(parts), y + 44


def _words(tokens: Sequence[Token], most: int = 60) -> Iterator[str]:
    for i, token in enumerate(tokens):
        if len(tokens) <= most or i < most // 2 or i >= len(tokens) - most // 2:
            yield quoted(token.text)
        elif i == most // 2:
            yield f"… {len(tokens) - most} more …"


def _strip(stage: Stage, title: Both, y: float, layout: Layout) -> str:
    """Draw the last token's vector in cells (magnitude as size, sign as colour and shape), its shape, its largest entries, its state."""
    count = min(layout.cells, len(stage.vector))
    bins = [part[part.abs().argmax()].item() for part in stage.vector.tensor_split(count)]
    scale = max(map(abs, bins)) or 1.0
    parts = [text(8 if stage.part != "ffn" else 34, y + 13, Both(*map(str.strip, title)), "name" if stage.part != "ffn" else "", "start")]
    y += layout.head
    for i, value in enumerate(bins):
        kind, round_ = ("neg", 4) if value < 0 else ("pos", 1)
        parts.append(
            f'<rect x="{layout.left + i * CELL}" y="{y + 2:g}" width="{CELL - 1}" height="16" rx="{round_}" class="{kind}" '
            f'fill-opacity="{abs(value) / scale:.2f}" data-value="{value:.3g}"/>'
        )
    right, low = (layout.left, y + 34) if layout.below else (layout.left + layout.cells * CELL + 12, y + 9)
    parts.append(text(right, low, shape(stage.shape), "shape", "start"))
    parts.append(text(right, low + (16 if layout.below else 13), largest(stage), "shape", "start"))
    if more := told(stage):
        parts.append(text(layout.left, y + (66 if layout.below else 31), more, "shape", "start"))
    return "".join(parts)


def _candidates(walk: Walkthrough, y: float, layout: Layout) -> tuple[str, float]:
    """Draw the logits of the most likely tokens, and their probabilities as bars; the chosen one is marked."""
    size = walk.stages[-1].shape
    told = Both(*(f"{shape(size)}: {words}" for words in logits(size[-1])))
    left = layout.left
    parts = [text(8, y + 13, TITLES["classify"], "name", "start"), text(left, y + 13 + layout.head, told, "shape", "start")]
    y += 26 + layout.head
    parts.append(text(8, y + 13, TITLES["sample"], "name", "start") + text(8, y + 29, how(walk), "shape", "start"))
    y += 2 * layout.head
    for token in walk.candidates:
        chosen = token.number == walk.written[0].number
        parts.append(text(left + 80, y + 13, quoted(token.text), "name" if chosen else "", "end"))
        parts.append(
            f'<rect x="{left + 90}" y="{y + 2:g}" width="{max(1.0, layout.bar * token.probability):.1f}" height="15" class="pos"/>'
        )
        figures = f"{percent(token.probability)}, logit {token.logit:.2f}"
        words = Both(f"{figures}  ← chosen", f"{figures}  ← 选中") if chosen else figures
        parts.append(text(left + 98 + max(1.0, layout.bar * token.probability), y + 13, words, "shape", "start"))
        y += 22
    return "".join(parts), y + 8
