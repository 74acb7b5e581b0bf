"""Parts of the pages of all reports: the document, tables, plots, and the conditions of the measurement."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from linattn.report.charts import Chart
from linattn.report.plot import STYLES

SENTENCE = 24  # letters; a cell with more makes its column one of sentences
STYLES_ONLY = "default-src 'none'; style-src 'unsafe-inline'"  # content policy of a page that loads nothing


def opening(policy: str) -> str:
    """Beginning of a page, up to its title, under a content security ``policy``."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">"""


def document(title: str, parts: Sequence[str], data: object) -> str:
    """Render a page of ``parts``, which are HTML, with ``data``, the figures of the page, inlined as JSON."""
    return f"""{opening(STYLES_ONLY)}
<title>{escape(title)} · linattn</title>
<style>
{Path(__file__).with_name("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{chr(10).join(parts)}
</main>
<script type="application/json" id="report">{inlined(data)}</script>
</body>
</html>
"""


def inlined(value: object) -> str:
    """Encode JSON for a script element, without characters that could end the element or a line of a script."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], caption: str) -> str:
    """A table whose first column names the rows (already HTML); cells and heads are text. Columns of sentences are broken into lines."""
    long = [any(len(cells[i]) > SENTENCE for _, cells in rows) for i in range(len(heads) - 1)]
    kinds = [' class="words"' if one else "" for one in long]
    head = "".join(f'<th scope="col"{kind}>{escape(h)}</th>' for h, kind in zip(heads, ["", *kinds], strict=True))
    lines = (
        f'<tr><th scope="row">{name}</th>{"".join(f"<td{kind}>{escape(c)}</td>" for c, kind in zip(cells, kinds, strict=True))}</tr>'
        for name, cells in rows
    )
    caption = escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table><caption><span>{caption}</span></caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(lines)}</tbody></table></div>"
    )


def named(name: str, style: int) -> str:
    """Name with a sample of its line in the plots."""
    s = f"s{style % STYLES}"
    return f'<span class="key"><svg viewBox="0 0 34 12" aria-hidden="true"><path class="line {s}" d="M1 6H33"/></svg>{escape(name)}</span>'


def plots(drawn: Sequence[Chart]) -> str:
    """Section of the plots with their descriptions and results."""
    figures = "\n".join(
        f"<figure><h3>{escape(c.title)}</h3>\n<figcaption>{escape(c.meaning)} <b>{escape(c.found)}</b></figcaption>\n{c.svg}</figure>"
        for c in drawn
    )
    return f'<h2>The plots</h2>\n<div class="plots">\n{figures}\n</div>'


def how(facts: dict[str, str]) -> str:
    """Conditions of the measurement as HTML: names and their values."""
    listed = "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in facts.items())
    return f'<h2>How it was measured</h2>\n<dl>{listed}</dl>\n<p class="soft">Every figure of this page is in report.json beside it.</p>'


def machine_facts(machine: dict) -> dict[str, str]:
    """Facts from :func:`linattn.report.machine.machine`, for :func:`how`."""
    versions = (f"{name} {escape(str(machine[key]))}" for name, key in _VERSIONS)
    card = f"{escape(machine['accelerator'])}; " if machine.get("accelerator") else ""
    return {
        "Machine": f"{card}{escape(machine['cpu'])}, {machine['cores']} cores, {threads(machine)}, {escape(machine['system'])}",
        "Versions": ", ".join(versions),
    }


def measured_by(report: dict) -> str:
    """Machine, date and command of the measurement."""
    machine, day, command = report["machine"], report["created"][:10], report["command"]
    return f"Measured on {escape(machine['cpu'])}, {threads(machine)}, {escape(day)}, by <code>{escape(command)}</code>."


def papers(mixers: Sequence[dict]) -> str:
    """Titles of ``mixers`` with their papers."""
    return ", ".join(escape(m["title"]) + (f" (arXiv {escape(m['arxiv'])})" if m["arxiv"] else "") for m in mixers)


_VERSIONS = (("linattn", "linattn"), ("torch", "torch"), ("transformers", "transformers"), ("Python", "python"))


def threads(machine: dict) -> str:
    """1 thread, 4 threads."""
    return "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
