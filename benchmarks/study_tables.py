"""Tables of comparisons, studies and trainings, for :mod:`benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.plots import first_width_done
from benchmarks.titles import markdown
from linattn.compare.tasks import load
from linattn.report.words import memory, tokens
from linattn.reproduce import variants


def compared(body: dict, words: dict) -> str:
    """Scores of a task without its speeds: a line for each mixer, and for references without a model."""
    judged = [f for f in load(body["task"]).figures if not f.key.endswith("_per_second")]
    rows = [(m["name"], *(f.cell(m) for f in judged)) for m in body["mixers"]]
    known = body["data"].get("references", {})
    rows += [(name, *(f.write(told[f.key]) for f in judged)) for name, told in known.items()]
    facts = {**body["machine"], "command": body["command"], "seeds": body["options"]["seeds"], "date": body["created"][:10]}
    return words["compared" if facts["seeds"] > 1 else "one seed"].format(**facts) + "\n\n" + markdown(words[body["task"]], rows)


def recall(body: dict, words: dict) -> str:
    """Line for each mixer: the share of right answers, over the widths if there are several."""
    found = {(row["task"], row["dim"], row["mixer"]): row for row in body["rows"]}
    dims = {task: sorted({dim for t, dim, _ in found if t == task}) for task in ("mqar", "forgetting", *words["mad"])}
    cells = (
        (
            variants.label(mixer),
            memory(found["mqar", 128, mixer]["state_bytes"]),
            *(" · ".join(f"{found[task, dim, mixer]['accuracy']:.2f}" for dim in of) for task, of in dims.items()),
        )
        for mixer in dict.fromkeys(row["mixer"] for row in body["rows"])
    )
    name, state, *swept = words["recall"]
    swept = [title.format(dims=" · ".join(map(str, of))) for title, of in zip(swept, dims.values(), strict=False)]
    return _one_seed(body, words) + markdown((name, state, *swept, *words["mad"].values()), cells)


def copying(body: dict, words: dict) -> str:
    """Line for each mixer: right answers from the longest length of the training on; for induction at every other length."""
    curves = {(row["task"], row["mixer"]): {point["length"]: point["whole"] for point in row["curve"]} for row in body["rows"]}
    state = {row["mixer"]: row["state_bytes"] for row in body["rows"] if row["task"] == "induction"}
    shown = {}
    for task, every in (("induction", 2), ("copying", 1)):
        longest = max(body["settings"]["train"][task])
        shown[task] = [n for n in body["settings"]["test"][task] if n >= longest][::every]

    def shares(mixer: str) -> Iterable[str]:
        for task, lengths in shown.items():
            found = (curves[task, mixer][n] for n in lengths)
            yield " · ".join("–" if share is None else f"{share:.2f}" for share in found)

    cells = ((variants.label(mixer), memory(size), *shares(mixer)) for mixer, size in state.items())
    lengths = {task: " · ".join(map(tokens, of)) for task, of in shown.items()}
    return _one_seed(body, words) + markdown((title.format(**lengths) for title in words["copying"]), cells)


def extrapolation(body: dict, words: dict) -> str:
    """Line for each mixer: bits per byte at the lengths of the training, and far beyond them."""
    cells = ((variants.label(r["mixer"]), *(f"{r[name]:.3f}" for name in ("learned", "carried", "fresh"))) for r in body["rows"])
    lengths = {name: f"{body['settings'][name]:,}" for name in ("context", "length")}
    return _one_seed(body, words) + markdown((title.format(**lengths) for title in words["extrapolation"]), cells)


def hybrids(body: dict, words: dict) -> str:
    """Line for each share of softmax."""
    cells = (
        (f"{row['share']}", f"{row['recall']:.2f}", f"{row['bits_per_byte']:.3f}", memory(row["state_bytes"]), f"{row['decode_ms']:.3g}")
        for row in body["rows"]
    )
    context = f"{body['settings']['context']:,}"
    return _one_seed(body, words) + markdown((title.format(context=context) for title in words["hybrids"]), cells)


def precision(body: dict, words: dict) -> str:
    """Line for each dtype, and one for each cache and state that is restored."""
    rounded = [row for row in body["rows"] if row.get("every") == 1]
    errors = {(row["mixer"], row["dtype"]): row["error"] for row in rounded if row.get("error") is not None}
    recalled = {(row["mixer"], row["dtype"]): row["recall"] for row in rounded if row.get("recall") is not None}
    rules, mixers = (list(dict.fromkeys(mixer for mixer, _ in of)) for of in (errors, recalled))
    cells = (
        (dtype, " · ".join(f"{errors[rule, dtype]:.1e}" for rule in rules), " · ".join(f"{recalled[m, dtype]:.3f}" for m in mixers))
        for dtype in dict.fromkeys(row["dtype"] for row in rounded)
    )
    facts = {"tokens": f"{body['settings']['length']:,}", "rules": " · ".join(rules), "mixers": " · ".join(mixers)}
    first = markdown((title.format(**facts) for title in words["precision"]), cells)
    lines = []
    for row in body["rows"]:
        if row.get("bytes") is not None:
            name = words["cache" if row["mixer"] == "softmax" else "state"].format(tokens=f"{row['tokens']:,}", mixer=row["mixer"])
            lines.append((name, memory(row["bytes"]), *(f"{1e3 * row[place]:.3g}" for place in ("accelerator", "memory", "disk"))))
    return _one_seed(body, words) + first + "\n" + markdown(words["brought"], lines)


def _swept(body: dict, words: dict) -> str:
    short = [r for r in body["rows"] if r["steps"] == body["sweep_steps"] and "failure" not in r]
    found = {(r["model"], r["learning_rate"]): r for r in short}
    rates = sorted({rate for _, rate in found})
    write = lambda r: "–" if r is None else f"{r['history'][-1]['validation_bits_per_byte']:.3f}"  # noqa: E731
    lines = [(name, *(write(found.get((name, rate))) for rate in rates)) for name in body["mixers"]]
    facts = {
        "card": body["card"],
        "torch": body["run"]["torch"],
        "date": body["date"],
        "steps": body["sweep_steps"],
        "dim": body["dims"][0],
    }
    return words["swept"].format(**facts) + "\n\n" + markdown((words["losses"][0], *map("{:g}".format, rates)), lines)


def losses(body: dict, words: dict) -> str:
    """Row for each model: learning rate, and at each width the final loss, speed and time; until all exist, the short trainings."""
    if not first_width_done(body):
        return _swept(body, words)
    rows = {(r["model"], r["dim"]): r for r in body["rows"] if r["steps"] == body["steps"]}
    dims, tokens = sorted({dim for _, dim in rows}), body["steps"] * body["batch_size"] * body["context"]
    sizes = [f"{next(r['parameters'] for (_, d), r in rows.items() if d == dim) / 1e6:.0f}M" for dim in dims]
    lines = []
    for name in body["mixers"]:
        there = [rows.get((name, dim)) for dim in dims]
        done = [None if r is None or "failure" in r else r for r in there]
        figures = (
            lambda r: f"{r['history'][-1]['validation_bits_per_byte']:.3f}",
            lambda r: f"{r['tokens_per_second'] / 1e3:,.0f}k",
            lambda r: f"{tokens / r['tokens_per_second']:.0f}",
        )
        rate = "–" if there[0] is None else f"{there[0]['learning_rate']:g}"
        lines.append((name, rate, *(" · ".join("–" if r is None else write(r) for r in done) for write in figures)))
    titles = [title.format(first=dims[0], sizes=" · ".join(sizes)) for title in words["losses"]]
    orders = []
    for dim, size in zip(dims, sizes, strict=True):
        ranked = [r for (_, d), r in rows.items() if d == dim and "failure" not in r]
        names = ", ".join(r["model"] for r in sorted(ranked, key=lambda r: r["history"][-1]["validation_bits_per_byte"]))
        orders.append(words["order"].format(size=size, names=names))
    facts = {"command": body["command"], "card": body["card"], "torch": body["run"]["torch"], "date": body["date"]}
    facts |= {"tokens": tokens / 1e6, "wan": tokens / 1e4, "context": body["context"], "batch": body["batch_size"] * body["context"]}
    ordered = words["space"].join(orders)
    return "\n\n".join([words["trained"].format(**facts), f"{markdown(titles, lines)}\n{ordered}", words["curves"]]) + "\n"


def causality(body: dict, words: dict) -> str:
    """Line for each way to evaluate the weights of a run."""
    lines = []
    for r in body["rows"]:
        way = words["ways"][r["way"]] + (f", {r['backend']}, {r['dtype']}" if "backend" in r else "")
        beside, changed = (write.format(r[key]) if key in r else "–" for key, write in (("whole", "{:.4f}"), ("changed", "{:.1g}")))
        lines.append((r["run_folder"], way, f"{r['tokens']:,}" if "tokens" in r else "–", f"{r['bits_per_byte']:.4f}", beside, changed))
    run = body["runs"][-1]
    return words["run"].format(**run) + "\n\n" + markdown(words["causality"], lines)


def _one_seed(body: dict, words: dict) -> str:
    facts = {**body["machines"][0], "cpu": body["machines"][0]["accelerator"], "command": body["command"], "date": body["created"][:10]}
    return words["one seed"].format(**facts) + "\n\n"


STUDIES = {"recall": recall, "copying": copying, "extrapolation": extrapolation, "hybrids": hybrids, "precision": precision}


def reproduced(body: dict, words: dict) -> str:
    return STUDIES[body["study"]](body, words)
