"""Drawing of a traced generation step, and a page with the drawing and the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from linattn.atlas.svg import alone, drawing, text, wire
from linattn.atlas.text import CODES, Both
from linattn.generate.trace import Stage, Token, Trace
from linattn.report.html import opening
from linattn.report.language import HIDES, SWITCH, policy, script, spoken
from linattn.report.trace import TITLES, ended, how, largest, lines, logits, name_of, quoted, shape, told
from linattn.report.words import percent

WIDTH, LEFT, ROW = 980, 190, 34
CELLS, CELL = 48, 9  # of a strip: neighbouring channels share a cell, which shows the one farthest from 0
CHIP = 7.8  # mean width of a character


def svg(trace: Trace, language: str = "en") -> str:
    """Draw the trace as an SVG file with text in ``language``."""
    return alone(_drawn(trace), language)


def page(trace: Trace) -> str:
    """Make a self-contained page in English and Chinese."""
    title = Both(f"From text to text: {quoted(trace.prompt)}", f"从文本到文本：{quoted(trace.prompt)}")
    pictures = "".join(f'<div lang="{code}">{svg(trace, key).partition(chr(10))[2]}</div>' for key, code in CODES.items())
    figures = "".join(f'<pre tabindex="0" lang="{c}">{escape(chr(10).join(lines(trace, k)))}</pre>\n' for k, c in CODES.items())
    return f"""{opening(policy())}
<title data-title-en="{escape(title.en)} · linattn" data-title-zh="{escape(title.zh)} · linattn">{escape(title.en)} · linattn</title>
<style>
{HIDES}
:root {{ color-scheme: light; }}
body {{ margin: 1.5rem auto; padding: 0 1rem; max-width: 1240px; background: #fff; color: #1b1f24; font-family: sans-serif; }}
.switches {{ text-align: right; }}
h1 {{ font-size: 1.3rem; overflow-wrap: anywhere; }}
svg {{ display: block; width: 100%; height: auto; }}
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


def _drawn(trace: Trace) -> str:
    """Draw from top to bottom: tokens, a strip for every stage, the candidates, the loop."""
    parts: list[str] = []
    y = 20.0
    y = _add(parts, *_chips(TITLES["tokenise"], trace.tokens, y))
    for stage in trace.stages[:-1]:
        title = {"embedding": TITLES["embedding"], "norm": Both("norm", "归一化")}.get(stage.part) or name_of(stage)
        parts.append(wire([(LEFT - 12, y - 12), (LEFT - 12, y + 6)]))
        y = _add(parts, _strip(stage, title, y), y + ROW + (14 if told(stage) else 0))
    y = _add(parts, *_candidates(trace, y + 8))
    y = _add(parts, *_chips(TITLES["loop"], trace.written, y + 8))
    parts.append(text(LEFT, y, Both(f"ended {ended(trace).en}", ended(trace).zh), "tick", "start"))
    parts.append(wire([(WIDTH - 26, y - 33), (WIDTH - 10, y - 33), (WIDTH - 10, 31), (WIDTH - 26, 31)], dashed=True))
    label = Both(f"One step of a generation after {quoted(trace.prompt)}", f"{quoted(trace.prompt)} 之后的一步生成")
    return drawing(WIDTH, y + 16, parts, label, "cells")


def _add(parts: list[str], drawn: str, y: float) -> float:
    parts.append(drawn)
    return y


def _chips(title: Both, tokens: Sequence[Token], y: float) -> tuple[str, float]:
    """Draw tokens in boxes, line after line, and return the next free y; of many the first and the last."""
    parts, x = [text(8, y + 15, title, "name", "start")], float(LEFT)
    for word in _words(tokens):
        width = CHIP * len(word) + 12
        if x + width > WIDTH - 40:
            x, y = float(LEFT), y + 28
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


def _strip(stage: Stage, title: Both, y: float) -> str:
    """Draw the last token's vector in cells (magnitude as size, sign as colour and shape), its shape, its largest entries, its state."""
    count = min(CELLS, len(stage.vector))
    bins = [part[part.abs().argmax()].item() for part in stage.vector.tensor_split(count)]
    scale = max(map(abs, bins)) or 1.0
    parts = [text(8 if stage.part != "ffn" else 34, y + 13, Both(*map(str.strip, title)), "name" if stage.part != "ffn" else "", "start")]
    for i, value in enumerate(bins):
        kind, round_ = ("neg", 4) if value < 0 else ("pos", 1)
        parts.append(
            f'<rect x="{LEFT + i * CELL}" y="{y + 2:g}" width="{CELL - 1}" height="16" rx="{round_}" class="{kind}" '
            f'fill-opacity="{abs(value) / scale:.2f}" data-value="{value:.3g}"/>'
        )
    right = LEFT + CELLS * CELL + 12
    parts.append(text(right, y + 9, shape(stage.shape), "shape", "start"))
    parts.append(text(right, y + 22, largest(stage), "shape", "start"))
    if more := told(stage):
        parts.append(text(LEFT, y + 31, more, "shape", "start"))
    return "".join(parts)


def _candidates(trace: Trace, y: float) -> tuple[str, float]:
    """Draw the logits of the most likely tokens, and their probabilities as bars; the chosen one is marked."""
    size = trace.stages[-1].shape
    told = Both(*(f"{shape(size)}: {words}" for words in logits(size[-1])))
    parts = [text(8, y + 13, TITLES["classify"], "name", "start"), text(LEFT, y + 13, told, "shape", "start")]
    y += 26
    parts.append(text(8, y + 13, TITLES["sample"], "name", "start") + text(8, y + 29, how(trace), "shape", "start"))
    for token in trace.candidates:
        chosen = token.number == trace.written[0].number
        parts.append(text(LEFT + 80, y + 13, quoted(token.text), "name" if chosen else "", "end"))
        parts.append(f'<rect x="{LEFT + 90}" y="{y + 2:g}" width="{max(1.0, 360 * token.probability):.1f}" height="15" class="pos"/>')
        figures = f"{percent(token.probability)}, logit {token.logit:.2f}"
        words = Both(f"{figures}  ← chosen", f"{figures}  ← 选中") if chosen else figures
        parts.append(text(LEFT + 98 + max(1.0, 360 * token.probability), y + 13, words, "shape", "start"))
        y += 22
    return "".join(parts), y + 8
