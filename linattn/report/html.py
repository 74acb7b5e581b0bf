"""Parts of the pages of all reports: the document, tables, plots, and the conditions of the measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from linattn.report.charts import Chart
from linattn.report.language import HIDES, SWITCH, Both, Words, both, labelled, markup, policy, script, spoken
from linattn.report.plot import STYLES

SENTENCE = 24  # characters; columns with longer cells are columns of sentences
STYLES_ONLY = "default-src 'none'; style-src 'unsafe-inline'"  # content security policy of a page that loads nothing


def opening(policy: str) -> str:
    """Beginning of a page, up to its title, under the content security ``policy``."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">"""


def document(title: Words, parts: Sequence[str], data: object) -> str:
    """Render a page of ``parts``, which are HTML, with ``data``, the figures of the page, inlined as JSON."""
    said = both(title)
    return f"""{opening(policy())}
<title data-title-en="{escape(said.en)} · linattn" data-title-zh="{escape(said.zh)} · linattn">{escape(said.en)} · linattn</title>
<style>
{HIDES}
{Path(__file__).with_name("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<div class="switches">{SWITCH}</div>
<h1>{spoken(said)}</h1>
{chr(10).join(parts)}
</main>
<script type="application/json" id="report">{inlined(data)}</script>
<script>{script()}</script>
</body>
</html>
"""


def inlined(value: object) -> str:
    """Encode JSON for a script element, without characters that could end the element or a line of a script."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(heads: Sequence[Words], rows: Sequence[tuple[str, Sequence[Words]]], caption: Words) -> str:
    """Table whose first column has the rows' names (already HTML); cells and heads are text. Columns of sentences wrap."""
    long = [any(len(both(cells[i]).en) > SENTENCE for _, cells in rows) for i in range(len(heads) - 1)]
    kinds = [' class="words"' if one else "" for one in long]
    head = "".join(f'<th scope="col"{kind}>{spoken(h)}</th>' for h, kind in zip(heads, ["", *kinds], strict=True))
    lines = (
        f'<tr><th scope="row">{name}</th>{"".join(f"<td{kind}>{spoken(c)}</td>" for c, kind in zip(cells, kinds, strict=True))}</tr>'
        for name, cells in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" {labelled(caption)}><table><caption><span>{spoken(caption)}</span></caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(lines)}</tbody></table></div>"
    )


def section(title: Words, *parts: str) -> str:
    """A heading and what follows it, which is HTML."""
    return "\n".join([f"<h2>{spoken(title)}</h2>", *parts])


def named(name: Words, style: int) -> str:
    """Name with a sample of its line in the plots."""
    s = f"s{style % STYLES}"
    return f'<span class="key"><svg viewBox="0 0 34 12" aria-hidden="true"><path class="line {s}" d="M1 6H33"/></svg>{spoken(name)}</span>'


def plots(drawn: Sequence[Chart]) -> str:
    """Section of the plots with their descriptions and results."""
    figures = "\n".join(
        f"<figure><h3>{spoken(c.title)}</h3>\n<figcaption>{spoken(c.meaning)} <b>{spoken(c.found)}</b></figcaption>\n{c.svg}</figure>"
        for c in drawn
    )
    return section(Both("Plots", "曲线与柱图"), f'<div class="plots">\n{figures}\n</div>')


def how(facts: Mapping[Words, Both | str]) -> str:
    """Conditions of the measurement: names and their values, which are HTML."""
    listed = "".join(f"<dt>{spoken(k)}</dt>{markup(v, 'dd') if isinstance(v, Both) else f'<dd>{v}</dd>'}" for k, v in facts.items())
    end = markup(Both("Every figure of this page is in report.json beside it.", "本页的所有数字都在同目录的 report.json 中。"), "p", "soft")
    return section(Both("How it was measured", "测量条件"), f"<dl>{listed}</dl>", end)


def machine_facts(machine: dict) -> dict[Words, Both | str]:
    """Facts from :func:`linattn.report.machine.machine`, for :func:`how`."""
    versions = ", ".join(f"{name} {escape(str(machine[key]))}" for name, key in _VERSIONS)
    card = f"{escape(machine['accelerator'])}; " if machine.get("accelerator") else ""
    cpu, system, used = escape(machine["cpu"]), escape(machine["system"]), threads(machine)
    described = Both(
        f"{card}{cpu}, {machine['cores']} cores, {used.en}, {system}", f"{card}{cpu}，{machine['cores']} 核，{used.zh}，{system}"
    )
    return {"Machine": described, "Versions": versions}


def measured_by(report: dict) -> Both:
    """Machine, date and command of the measurement, as HTML."""
    machine, day, command = report["machine"], escape(report["created"][:10]), f"<code>{escape(report['command'])}</code>"
    cpu, used = escape(machine["cpu"]), threads(machine)
    return Both(f"Measured on {cpu}, {used.en}, {day}, by {command}.", f"测量于 {cpu}，{used.zh}，{day}，命令为 {command}。")


def papers(mixers: Sequence[dict]) -> str:
    """Titles of ``mixers`` with their papers."""
    titles = {m["title"]: f" (arXiv {escape(m['arxiv'])})" if m["arxiv"] else "" for m in mixers}
    return ", ".join(escape(title) + paper for title, paper in titles.items())


_VERSIONS = (("linattn", "linattn"), ("torch", "torch"), ("transformers", "transformers"), ("Python", "python"))


def threads(machine: dict) -> Both:
    """1 thread, 4 threads."""
    count = machine["threads"]
    return Both(f"{count} {'thread' if count == 1 else 'threads'}", f"{count} 个线程")
