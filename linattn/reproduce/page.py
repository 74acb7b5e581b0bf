"""report.html of a study: the question, the table with what the papers say, the plots, and how it was measured."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any

from linattn.experiment.study import Study, shown
from linattn.report.html import document, how, machine_facts, named, plots, table
from linattn.reproduce import variants


def page(report: dict, study: Study, settings: Any, counts: tuple[int, int]) -> str:
    """The whole page for ``report`` (what report.json holds); ``counts``: runs that are done, and that are wanted."""
    parts = [_opening(report, counts), _table(report, study)]
    if report["rows"] and (drawn := study.charts(settings, report["rows"])):
        parts.append(plots(drawn))
    return document(study.title, [*parts, _remarks(report), how(_facts(report, counts))], report)


def _opening(report: dict, counts: tuple[int, int]) -> str:
    missing = "" if report["complete"] else f" <b>{counts[0]:,} of {counts[1]:,} runs are done; the same command does the rest.</b>"
    return f'<p>{escape(report["question"])}{missing}</p>\n<p class="soft">Made by <code>{escape(report["command"])}</code>.</p>'


def _table(report: dict, study: Study) -> str:
    first, *others = shown(study.all_columns, report["rows"]) if report["rows"] else study.all_columns
    names = list(dict.fromkeys(str(row.get("mixer")) for row in report["rows"]))
    rows = []
    for row in report["rows"]:
        name = named(variants.label(row["mixer"]), names.index(row["mixer"])) if first.key == "mixer" else escape(first.cell(row))
        rows.append((name, [c.cell(row) for c in others]))
    caption = "Mean ± sample standard deviation over the seeds, where there are several."
    return "<h2>The figures</h2>" + table([c.heading for c in (first, *others)], rows, caption)


def _remarks(report: dict) -> str:
    left = [f"Left out: {said}" for said in left_out(report)]
    failed = [f"Failed: {_said(x['run'])}: {x['error']}" for x in report["failures"]]
    notes = [*report["notes"], *left, *failed]
    return f"<h2>To know before one quotes</h2>\n<ul>{''.join(f'<li>{escape(n)}</li>' for n in notes)}</ul>" if notes else ""


def left_out(report: dict) -> list[str]:
    """Measurements that failed, with the reason, once for all runs of a mixer."""
    counts = Counter((str(x["run"].get("mixer", "all")), x["reason"]) for x in report["left_out"])
    return [f"{variants.label(mixer)}, {count} {'run' if count == 1 else 'runs'}: {why}" for (mixer, why), count in counts.items()]


def _said(run: dict) -> str:
    return ", ".join(f"{k} {v}" for k, v in run.items() if isinstance(v, str | int | float) and k != "device")


def _facts(report: dict, counts: tuple[int, int]) -> dict[str, str]:
    facts = {
        "Command": f"<code>{escape(report['command'])}</code>",
        "Settings": escape(", ".join(f"{k} {_written(v)}" for k, v in report["settings"].items())),
        "Runs": f"{counts[0]:,} of {counts[1]:,}, {sum(r['seconds'] for r in report['runs']) / 60:,.1f} minutes of work in all",
    }
    for i, machine in enumerate(report["machines"]):
        which = f" {i + 1}" if len(report["machines"]) > 1 else ""
        facts |= {f"{name}{which}": said for name, said in machine_facts(machine).items()}
    return facts | {"Begun": escape(report["created"])}


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return f"({', '.join(f'{k} {_written(v)}' for k, v in value.items())})"
    return " ".join(map(_written, value)) if isinstance(value, list | tuple) else str(value)
