"""The table of an evaluation, and report.html with plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from linattn.report.charts import Chart, line_chart
from linattn.report.html import document, how, machine_facts, named, plots, table
from linattn.report.language import Both, Words
from linattn.report.plot import Axis, Heading, Series
from linattn.report.scales import linear, logarithmic
from linattn.report.words import figure, memory, memory_tick, percent, tick, tokens

_TITLES = {"needle": "Number among sentences", "variables": "Chain of assignments", "words": "Most frequent word"}


def names(report: dict[str, Any]) -> list[str]:
    """Short names of the models, with the teacher marked."""
    paths = [Path(m["name"]) for m in report["models"]]
    short = [p.name for p in paths]
    shown = [n if short.count(n) == 1 else str(p) for n, p in zip(short, paths, strict=True)]
    return [f"{n} (teacher)" if i == 0 and report["options"]["teacher"] else n for i, n in enumerate(shown)]


def rows(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table, one line per model."""
    first = report["models"][-1]
    heads = ["model", "mixer", "parameters", "bits per byte"]
    heads += ["KL", "top-1"] if report["options"]["teacher"] else []
    heads += [f"{t['task']} {tokens(t['length'])}" for t in first["tasks"]]
    for d in first["decoding"]:
        heads += [f"state at {tokens(d['length'])}", f"tokens/s at {tokens(d['length'])}"]
    lines = []
    for name, m in zip(names(report), report["models"], strict=True):
        line = [name, m["mixer"], f"{m['parameters']:,}", f"{m['bits_per_byte']:.3f}"]
        if report["options"]["teacher"]:
            line += [figure(m["kl"]), percent(m["top1"])] if "kl" in m else ["–", "–"]
        line += [percent(t["right"]) for t in m["tasks"]]
        for d in m["decoding"]:
            line += [memory(d["state_bytes"]), figure(d["tokens_per_s"])]
        lines.append(line)
    return heads, lines


def page(report: dict[str, Any]) -> str:
    """Render report.html."""
    heads, lines = rows(report)
    cells = [(named(name, i), line) for i, (name, *line) in enumerate(lines)]
    caption = f"Tasks: share of {report['options']['samples']} prompts answered by the greedy continuation."
    facts: dict[Words, Both | str] = {
        "Options": escape(", ".join(f"{k} {_written(v)}" for k, v in report["options"].items())),
        "Device": escape(report["device"]),
    }
    facts |= machine_facts(report["machine"]) | {"Begun": escape(report["created"])}
    return document("Evaluation", [table(heads, cells, caption), plots(_charts(report)), how(facts)], report)


def _charts(report: dict[str, Any]) -> list[Chart]:
    charts = []
    for task in dict.fromkeys(t["task"] for t in report["models"][0]["tasks"]):
        points = [[(t["length"], 100 * t["right"]) for t in m["tasks"] if t["task"] == task] for m in report["models"]]
        heading = Heading(f"task-{task}", _TITLES[task], "Right answers against the length of the prompt.")
        charts.append(_chart(heading, report, points, Axis("right, %", linear([0, 100]), tick), lambda right: percent(right / 100)))
    for key, title, label, write, say in (
        ("state_bytes", "State of a sequence", "bytes", memory_tick, memory),
        ("tokens_per_s", "Speed", "tokens/s", tick, figure),
    ):
        points = [[(d["length"], d[key]) for d in m["decoding"]] for m in report["models"]]
        if any(points):
            values = [y for line in points for _, y in line]
            scale = logarithmic(values, base=2) if key == "state_bytes" else linear(values, zero=True)
            heading = Heading(key, title, f"{title} after a prompt of this length.")
            charts.append(_chart(heading, report, points, Axis(label, scale, write), say))
    return charts


def _chart(
    heading: Heading, report: dict[str, Any], points: Sequence[Sequence[tuple[float, float]]], y: Axis, say: Callable[[float], str]
) -> Chart:
    series = [Series(name, line, i) for i, (name, line) in enumerate(zip(names(report), points, strict=True))]
    last = [(name, line[-1][1]) for name, line in zip(names(report), points, strict=True) if line]
    found = f"At the longest: {', '.join(f'{name} {say(value)}' for name, value in last)}."
    x = Axis("tokens", logarithmic([p for line in points for p, _ in line], base=2), tokens)
    return line_chart(heading, found, series, x, y)


def _written(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
