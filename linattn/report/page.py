"""report.html: one file that opens from disk, loads nothing and says in words what each plot shows."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

from linattn.generate.text import printable
from linattn.report.charts import Chart, charts
from linattn.report.plot import STYLES
from linattn.report.words import figure, memory, tokens

_NOTHING = "default-src 'none'; style-src 'unsafe-inline'"  # the browser is told to load nothing, too


def page(report: dict) -> str:
    """The whole page for ``report`` (what report.json holds)."""
    title = "Softmax and linear attention, side by side" if len(report["mixers"]) > 1 else f"{report['mixers'][0]['title']}, measured"
    parts = (_opening(report), _summary(report), _plots(charts(report)), _contexts(report), _samples(report), _how(report))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_NOTHING}">
<title>{escape(title)} · linattn</title>
<style>
{Path(__file__).with_name("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{chr(10).join(parts)}
</main>
<script type="application/json" id="report">{inlined(report)}</script>
</body>
</html>
"""


def inlined(value: object) -> str:
    """JSON that may stand in a script element: no character of it can end the element or a line of a script."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _opening(report: dict) -> str:
    o, m = report["options"], report["mixers"]
    exact = len({x["parameters"] for x in m}) == 1
    size = f"{m[0]['parameters']:,} parameters" if exact else f"about {figure(m[0]['parameters'])} parameters"
    seen = o["steps"] * o["batch_size"] * o["train_context"]
    many = f"{len(m)} language models of {size} each" if len(m) > 1 else f"One language model of {size}"
    return (
        f"<p>{many}, {o['layers']} layers of width {o['dim']}, learned {escape(report['corpus']['name'])}, byte by byte: "
        f"{o['steps']:,} steps, {seen:,} tokens. They differ in how a token looks back at the ones before it, and in nothing else "
        "but the width of the feed-forward, which makes their sizes equal.</p>"
        f'<p class="soft">Measured on {escape(report["machine"]["cpu"])}, {_threads(report["machine"])}, '
        f"{escape(report['created'][:10])}, by <code>{escape(report['command'])}</code>.</p>"
    )


def _summary(report: dict) -> str:
    longest = max(c["context"] for m in report["mixers"] for c in m["contexts"])
    heads = [
        "Mixer", "Parameters", "Feed-forward width", "Bits per byte", "Training, tokens/s", "Training, s",
        f"Prefill of {tokens(longest)}, ms", f"Decode at {tokens(longest)}, ms/token", f"State at {tokens(longest)}",
    ]  # fmt: skip
    rows = []
    for i, m in enumerate(report["mixers"]):
        t, last = m["training"], next((c for c in m["contexts"] if c["context"] == longest), None)
        ends = ["–"] * 3 if last is None else [figure(last["prefill_ms"]), figure(last["decode_ms"]), memory(last["state_bytes"])]
        cells = [f"{m['parameters']:,}", f"{m['ffn_dim']:,}", f"{t['validation_bits_per_byte']:.3f}", figure(t["tokens_per_second"])]
        rows.append((_named(m, i), [*cells, figure(t["seconds"]), *ends]))
    return "<h2>The figures</h2>" + _table(heads, rows, "Bits per byte are those of text that was not trained on; lower is better.")


def _contexts(report: dict) -> str:
    lengths = [c["context"] for c in report["key_value_cache"]]
    parts = ["<h2>At each context</h2>"]
    for key, caption, write in (
        ("prefill_ms", "Prefill: milliseconds to read a prompt of this many tokens", figure),
        ("decode_ms", "Decode: milliseconds per new token after this many tokens", figure),
        ("state_bytes", "State: what is kept after this many tokens", memory),
    ):
        rows = []
        for i, m in enumerate(report["mixers"]):
            values = {c["context"]: write(c[key]) for c in m["contexts"]}
            rows.append((_named(m, i), [values.get(n, "–") for n in lengths]))
        if key == "state_bytes":
            cache = {c["context"]: memory(c["bytes"]) for c in report["key_value_cache"]}
            rows.append(("A key-value cache, for comparison", [cache.get(n, "–") for n in lengths]))
        parts.append(_table(["Mixer", *(tokens(n) for n in lengths)], rows, caption))
    left = [(m["name"], x["context"], x["reason"]) for m in report["mixers"] for x in m["left_out"]]
    notes = [f"<li>{escape(name)} at {context:,} tokens: {escape(reason)}</li>" for name, context, reason in left]
    if notes:
        parts.append(f"<p>Left out:</p><ul>{''.join(notes)}</ul>")
    return "\n".join(parts)


def _plots(drawn: list[Chart]) -> str:
    figures = "\n".join(
        f"<figure><h3>{escape(c.title)}</h3>\n<figcaption>{escape(c.meaning)} <b>{escape(c.found)}</b></figcaption>\n{c.svg}</figure>"
        for c in drawn
    )
    return f'<h2>The plots</h2>\n<div class="plots">\n{figures}\n</div>'


def _samples(report: dict) -> str:
    parts = ["<h2>How each continues the same prompt</h2>", '<p class="soft">The prompt is underlined; the rest is the model\'s.</p>']
    parts.append('<div class="samples">')
    prompt = escape(printable(report["prompt"]))
    for i, m in enumerate(report["mixers"]):
        parts.append(f'<div><h3>{_named(m, i)}</h3><pre><span class="soft">{prompt}</span>{escape(printable(m["sample"]))}</pre></div>')
    return "\n".join([*parts, "</div>"])


def _how(report: dict) -> str:
    o, machine, corpus = report["options"], report["machine"], report["corpus"]
    facts = {
        "Command": f"<code>{escape(report['command'])}</code>",
        "Text": f"{escape(corpus['name'])}; sha256 <code>{escape(corpus['sha256'])}</code>",
        "Training": f"{o['steps']:,} steps of {o['batch_size']} sequences of {o['train_context']:,} tokens, seed {o['seed']}, "
        "float32; the same data in the same order for all",
        "Prefill, decode": "one sequence; a warm-up, then the median; decode goes on from the state that the prefill left",
        "Machine": f"{escape(machine['cpu'])}, {machine['cores']} cores, {_threads(machine)}, {escape(machine['system'])}",
        "Versions": f"linattn {escape(str(machine['linattn']))}, torch {escape(machine['torch'])}, transformers "
        f"{escape(str(machine['transformers']))}, Python {escape(machine['python'])}",
        "Made": escape(report["created"]),
    }
    papers = (f"{escape(m['title'])}" + (f" (arXiv {escape(m['arxiv'])})" if m["arxiv"] else "") for m in report["mixers"])
    facts["Mixers"] = ", ".join(papers)
    listed = "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in facts.items())
    return f'<h2>How it was measured</h2>\n<dl>{listed}</dl>\n<p class="soft">Every figure of this page is in report.json beside it.</p>'


def _threads(machine: dict) -> str:
    return "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"


def _named(mixer: dict, style: int) -> str:
    """The mixer's name behind a piece of its line in the plots."""
    s = f"s{style % STYLES}"
    return (
        f'<span class="key"><svg viewBox="0 0 34 12" aria-hidden="true"><path class="line {s}" d="M1 6H33"/>'
        f"</svg>{escape(mixer['name'])}</span>"
    )


def _table(heads: list[str], rows: list[tuple[str, list[str]]], caption: str) -> str:
    """A table whose first column names the rows (already HTML); cells and heads are text."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    lines = (f'<tr><th scope="row">{name}</th>{"".join(f"<td>{escape(c)}</td>" for c in cells)}</tr>' for name, cells in rows)
    caption = escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table><caption><span>{caption}</span></caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(lines)}</tbody></table></div>"
    )
