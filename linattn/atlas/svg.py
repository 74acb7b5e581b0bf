"""Parts of drawings. Colours come from the page's style sheet, in standalone files from an embedded copy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from linattn.atlas.text import CODES, Both

CELL, LEFT, TOP = 26, 62, 58  # of a grid, as in script/grid.js

SCHEMES = ("light", "dark")  # of colours, in the order in which the style sheet names them


def drawing(width: float, height: float, parts: Iterable[str], label: Both, kind: str = "") -> str:
    """SVG element of ``parts`` with an accessible name."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {width:g} {height:g}" style="max-width:{width * 1.25:g}px" '
        f'role="img" aria-label="{escape(label.en)}" data-label-en="{escape(label.en)}" data-label-zh="{escape(label.zh)}">'
        f"{''.join(parts)}</svg>"
    )


def text(x: float, y: float, words: Both | str, kind: str = "", anchor: str = "middle", extra: str = "") -> str:
    """Text at a position: one element, or one for each language."""
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}"{extra}'
    if isinstance(words, str) or words.en == words.zh:
        return f"<text {place}>{escape(words if isinstance(words, str) else words.en)}</text>"
    return "".join(f'<text {place} lang="{code}">{escape(getattr(words, key))}</text>' for key, code in CODES.items())


def symbol(x: float, y: float, name: str, kind: str = "t name") -> str:
    """Formula of one line: ``_t`` or ``_{t−1}`` is a subscript, ``^⊤`` a superscript."""
    parts = []
    for plain, mark, index in re.findall(r"([^_^]+)|([_^])(\{[^}]*\}|.)", name):
        if plain:
            parts.append(escape(plain))
            continue
        shift = 4 if mark == "_" else -5
        parts.append(f'<tspan dy="{shift}" font-size="75%">{escape(index.strip("{}"))}</tspan><tspan dy="{-shift}">\u200b</tspan>')
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" class="{kind}">{"".join(parts)}</text>'


def box(x: float, y: float, name: str, shape: str, tensor: str, width: float = 66, height: float = 44) -> str:
    """Box of a tensor: its symbol and its shape in a frame of its colour, around (x, y)."""
    kind = "shape long" if 9 * len(shape) > width else "shape"  # condensed on phones, where letters are large
    place = f'x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}"'
    return (
        f'<g class="t t{tensor}"><rect class="box" {place} rx="6"/>'
        f"{symbol(x, y - 3 if shape else y + 5, name)}{text(x, y + 16, shape, kind) if shape else ''}</g>"
    )


def wire(points: Sequence[tuple[float, float]], tensor: str = "", tip: bool = True, dashed: bool = False) -> str:
    """Line through ``points`` with an arrowhead at its last one."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    (x0, y0), (x, y) = points[-2:]
    size = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5 or 1.0
    dx, dy = (x - x0) / size, (y - y0) / size
    corner = [(x - 8 * dx - 4 * s * dy, y - 8 * dy + 4 * s * dx) for s in (1, -1)]
    head = (
        f'<path class="tip" d="M{x:g} {y:g}L{corner[0][0]:.1f} {corner[0][1]:.1f}L{corner[1][0]:.1f} {corner[1][1]:.1f}z"/>' if tip else ""
    )
    return f'<g class="t{tensor or "state"}"><path class="wire" d="{path}"{dash}/>{head}</g>'


def node(x: float, y: float, sign: str, tensor: str, ghost: bool = False) -> str:
    """Operation on a line: a disc with its sign; ``ghost`` if it is omitted."""
    dash = ' stroke-dasharray="3 3" opacity=".45"' if ghost else ""
    mark = "" if ghost else text(x, y + 5.5, sign, "t name")
    return f'<g class="t t{tensor}"><circle class="box" cx="{x:g}" cy="{y:g}" r="15"{dash}/>{mark}</g>'


def grid(
    values: Sequence[Sequence[float | None]],
    scale: float,
    label: Both,
    row_names: Sequence[Both] | None = None,
    col_names: Sequence[Both] | None = None,
) -> str:
    """Matrix as cells, as in script/grid.js: size is magnitude, squares are positive, discs negative, None is no cell."""
    left, top = LEFT if row_names else 2, TOP if col_names else 2
    rows, cols = len(values), len(values[0]) if values else 0
    parts = [text(left - 7, top + (r + 0.5) * CELL + 4, name, "tick", "end") for r, name in enumerate(row_names or ())]
    for c, name in enumerate(col_names or ()):
        x, y = left + (c + 0.5) * CELL + 4, top - 7
        parts.append(text(x, y, name, "tick", "start", f' transform="rotate(-60 {x:g} {y:g})"'))
    cells = (_cell(value, scale, r, c) for r, row in enumerate(values) for c, value in enumerate(row) if value is not None)
    parts.append(f'<g transform="translate({left} {top})">{"".join(cells)}</g>')
    return drawing(left + cols * CELL + (26 if col_names else 2), top + rows * CELL + 2, parts, label, "cells")


def _cell(value: float, scale: float, row: int, col: int) -> str:
    strength = min(abs(value) / scale, 1.0) if scale > 0 else 0.0
    kind, corner = ("neg", (CELL - 2) / 2) if value < 0 else ("pos", 2)
    return (
        f'<rect x="{col * CELL + 1}" y="{row * CELL + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="{corner:g}" class="{kind}" '
        f'fill-opacity="{round(strength, 2):g}" data-value="{value:.3g}"/>'
    )


def alone(svg: str, language: str, scheme: str = "light") -> str:
    """Make ``svg`` a file of its own: in one language, with the colours of one scheme inlined, without background.

    Raises:
        ValueError: for a language that is not "en" or "zh", and a scheme that is not "light" or "dark".
    """
    for argument, value, known in (("language", language, CODES), ("scheme", scheme, SCHEMES)):
        if value not in known:
            raise ValueError(f"{argument} must be one of {', '.join(known)}, but came as {value!r}")
    other = CODES["zh" if language == "en" else "en"]
    svg = re.sub(rf'<text [^>]*lang="{other}"[^>]*>.*?</text>', "", svg)
    label = re.search(rf'data-label-{language}="([^"]*)"', svg)
    svg = re.sub(r' data-label-(?:en|zh)="[^"]*"', "", svg)
    if label:
        svg = re.sub(r'aria-label="[^"]*"', lambda _: f'aria-label="{label[1]}"', svg, count=1)  # may have backslashes
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + svg.replace(">", f"><style>{_style(scheme)}</style>", 1) + "\n"


def _style(scheme: str) -> str:
    """Style rules of a standalone drawing, with the style sheet's colours in place of variables, which few programs support."""
    css = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", css)
    colours = {name: pair[SCHEMES.index(scheme)] for name, *pair in found}
    ink, soft, rule, back = (colours[name] for name in ("text", "soft", "rule", "back"))
    rules = [
        f"text{{fill:{ink};font:13px 'DejaVu Sans','Noto Sans','Noto Sans CJK SC',Arial,sans-serif}}",
        f".tick,.axis{{fill:{soft};font-size:12px}} .shape{{fill:{soft};font-size:11.5px}} .name{{font-weight:bold}}",
        f".pos{{fill:{colours['pos']}}} .neg{{fill:{colours['neg']}}} .cells rect{{stroke:{rule};stroke-width:.7}}",
        f".rule,.grid{{stroke:{rule};fill:none}}",
    ]
    for tensor in ("q", "k", "v", "state", "decay", "output"):
        own = colours[tensor]
        rules.append(f".t{tensor} .box{{fill:{_pale(own, back)};stroke:{own};stroke-width:1.5}}")
        rules.append(f".t{tensor} .wire{{fill:none;stroke:{own};stroke-width:1.7}}")
        rules.append(f".t{tensor} .tip,.t{tensor} text.t{{fill:{own}}}")
    for name, dash in re.findall(r"\.(s\d) \{ --c: var\(--s\d\); --d: ([^;]+);", css):
        own = colours[name]
        rules.append(f".{name} .line{{fill:none;stroke:{own};stroke-width:2;stroke-dasharray:{dash}}}")
        rules.append(f".{name}.lead{{fill:none;stroke:{own};stroke-width:1}}")
        rules.append(f".{name} .mark,text.{name}{{fill:{own}}} .{name} .mark{{stroke:{back};stroke-width:1}}")
    return " ".join(rules)


def _pale(colour: str, back: str) -> str:
    """Mix an eighth of ``colour`` into ``back``."""
    parts = ((int(colour[i : i + 2], 16), int(back[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(0.88 * under + 0.12 * own):02x}" for own, under in parts)
