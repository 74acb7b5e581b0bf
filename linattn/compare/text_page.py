"""report.html: one file that opens from disk, loads nothing and says in words what each plot shows."""

from __future__ import annotations

from html import escape

from linattn.compare.text_charts import charts
from linattn.generate.text import printable
from linattn.report.html import document, how, machine_facts, measured_by, named, papers, plots, table
from linattn.report.words import figure, memory, tokens


def page(report: dict) -> str:
    """The whole page for ``report`` (what report.json holds)."""
    title = "Softmax and linear attention, side by side" if len(report["mixers"]) > 1 else f"{report['mixers'][0]['title']}, measured"
    parts = (_opening(report), _summary(report), plots(charts(report)), _contexts(report), _samples(report), _how(report))
    return document(title, parts, report)


def _opening(report: dict) -> str:
    o, m = report["options"], report["mixers"]
    exact = len({x["parameters"] for x in m}) == 1
    size = f"{m[0]['parameters']:,} parameters" if exact else f"about {figure(m[0]['parameters'])} parameters"
    seen = o["steps"] * o["batch_size"] * o["train_context"]
    many = f"{len(m)} language models of {size} each" if len(m) > 1 else f"One language model of {size}"
    return (
        f"<p>{many}, {o['layers']} layers of width {o['dim']}, learned {escape(report['corpus']['name'])}, byte by byte: "
        f"{o['steps']:,} steps, {seen:,} tokens. They differ in their mixers, with the short convolutions, "
        "gates and norms that belong to them, in the learning rate where several were tried, and in the width of the feed-forward, which "
        "makes their sizes equal.</p>"
        f'<p class="soft">{measured_by(report)}</p>'
    )


def _summary(report: dict) -> str:
    longest = max(c["context"] for m in report["mixers"] for c in m["contexts"])
    heads = [
        "Mixer", "Parameters", "Feed-forward width", "Short convolution", "Learning rate", "Bits per byte",
        "Training, tokens/s", "Training, s",
        f"Prefill of {tokens(longest)}, ms", f"Decode at {tokens(longest)}, ms/token", f"State at {tokens(longest)}",
    ]  # fmt: skip
    rows = []
    for i, m in enumerate(report["mixers"]):
        t, last = m["training"], next((c for c in m["contexts"] if c["context"] == longest), None)
        ends = ["–"] * 3 if last is None else [figure(last["prefill_ms"]), figure(last["decode_ms"]), memory(last["state_bytes"])]
        conv = f"{m['conv_width']} tokens" if m["conv_width"] else "none"
        cells = [f"{m['parameters']:,}", f"{m['ffn_dim']:,}", conv, f"{t['learning_rate']:g}", f"{t['validation_bits_per_byte']:.3f}"]
        cells.append(figure(t["tokens_per_second"]))
        rows.append((named(m["name"], i), [*cells, figure(t["seconds"]), *ends]))
    return "<h2>The figures</h2>" + table(heads, rows, "Bits per byte are those of text that was not trained on; lower is better.")


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
            rows.append((named(m["name"], i), [values.get(n, "–") for n in lengths]))
        if key == "state_bytes":
            cache = {c["context"]: memory(c["bytes"]) for c in report["key_value_cache"]}
            rows.append(("A key-value cache, for comparison", [cache.get(n, "–") for n in lengths]))
        parts.append(table(["Mixer", *(tokens(n) for n in lengths)], rows, caption))
    left = [(m["name"], x["context"], x["reason"]) for m in report["mixers"] for x in m["left_out"]]
    notes = [f"<li>{escape(name)} at {context:,} tokens: {escape(reason)}</li>" for name, context, reason in left]
    if notes:
        parts.append(f"<p>Left out:</p><ul>{''.join(notes)}</ul>")
    return "\n".join(parts)


def _samples(report: dict) -> str:
    parts = ["<h2>How each continues the same prompt</h2>", '<p class="soft">The prompt is underlined; the rest is the model\'s.</p>']
    parts.append('<div class="samples">')
    prompt = escape(printable(report["prompt"]))
    for i, m in enumerate(report["mixers"]):
        parts.append(
            f'<div><h3>{named(m["name"], i)}</h3><pre><span class="soft">{prompt}</span>{escape(printable(m["sample"]))}</pre></div>'
        )
    return "\n".join([*parts, "</div>"])


def _rates(report: dict) -> str:
    """Learning rates that were tried, with what each mixer reached."""
    rates = report["options"]["learning_rate"]
    if len(rates) == 1:
        return f"learning rate {rates[0]:g} for all"
    each = (
        f"{escape(m['name'])} "
        + ", ".join(f"{t['validation_bits_per_byte']:.3f} at {t['learning_rate']:g}" for t in m["training"]["tried"])
        for m in report["mixers"]
    )
    return f"of {len(rates)} learning rates each mixer keeps its best (bits per byte: {'; '.join(each)})"


def _how(report: dict) -> str:
    o, machine, corpus = report["options"], report["machine"], report["corpus"]
    facts = {
        "Command": f"<code>{escape(report['command'])}</code>",
        "Text": f"{escape(corpus['name'])}; sha256 <code>{escape(corpus['sha256'])}</code>",
        "Training": f"{o['steps']:,} steps of {o['batch_size']} sequences of {o['train_context']:,} tokens, seed {o['seed']}, "
        "float32; the same data in the same order for all; "
        f"{_rates(report)}",
        "Prefill, decode": "one sequence; a warm-up, then the median; decode goes on from the state that the prefill left",
        **machine_facts(machine),
        "Made": escape(report["created"]),
    }
    facts["Mixers"] = papers(report["mixers"])
    return how(facts)
