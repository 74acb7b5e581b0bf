"""The table of an evaluation, and report.html with plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from linattn.report.charts import Chart, line_chart
from linattn.report.html import document, how, machine_facts, named, plots, table
from linattn.report.language import Both, Words, both
from linattn.report.plot import Axis, Heading, Series
from linattn.report.scales import linear, logarithmic
from linattn.report.words import figure, memory, memory_tick, percent, tick, tokens

_TITLES = {
    "needle": Both("Number among sentences", "句子中的数字"),
    "variables": Both("Chain of assignments", "赋值链"),
    "words": Both("Most frequent word", "出现最多的词"),
}


def names(report: dict[str, Any]) -> list[Words]:
    """Short names of the models, with the teacher marked."""
    paths = [Path(m["name"]) for m in report["models"]]
    short = [p.name for p in paths]
    shown = [n if short.count(n) == 1 else str(p) for n, p in zip(short, paths, strict=True)]
    return [Both(f"{n} (teacher)", f"{n}（教师）") if i == 0 and report["options"]["teacher"] else n for i, n in enumerate(shown)]


def rows(report: dict[str, Any]) -> tuple[list[Words], list[list[Words]]]:
    """Headings and cells of the table, one line per model."""
    first = report["models"][-1]
    heads: list[Words] = [Both("model", "模型"), "mixer", "parameters", "bits per byte"]
    heads += ["KL", "top-1"] if report["options"]["teacher"] else []
    heads += [Both(f"{t['task']} {tokens(t['length'])}", f"{_TITLES[t['task']].zh}，{tokens(t['length'])}") for t in first["tasks"]]
    heads += [f"{t['task']} {t['metric']}" for t in first["lm_eval"]]
    for d in first["decoding"]:
        at = tokens(d["length"])
        heads += [Both(f"state at {at}", f"{at} 处的状态"), Both(f"tokens/s at {at}", f"{at} 处的 token/秒")]
    lines = []
    for name, m in zip(names(report), report["models"], strict=True):
        line: list[Words] = [name, m["mixer"], f"{m['parameters']:,}", f"{m['bits_per_byte']:.3f}"]
        if report["options"]["teacher"]:
            line += [figure(m["kl"]), percent(m["top1"])] if "kl" in m else ["–", "–"]
        line += [percent(t["right"]) for t in m["tasks"]]
        line += [figure(t["value"]) for t in m["lm_eval"]]
        for d in m["decoding"]:
            line += [memory(d["state_bytes"]), figure(d["tokens_per_s"])]
        lines.append(line)
    return heads, lines


def page(report: dict[str, Any]) -> str:
    """Render report.html."""
    heads, lines = rows(report)
    cells = [(named(name, i), line) for i, (name, *line) in enumerate(lines)]
    samples = report["options"]["samples"]
    caption = Both(
        f"Tasks: share of {samples} prompts answered by the greedy continuation.", f"各任务：{samples} 个提示中，贪心续写答对的比例。"
    )
    facts: dict[Words, Both | str] = {
        "Options": escape(", ".join(f"{k} {_written(v)}" for k, v in report["options"].items())),
        "Device": escape(report["device"]),
    }
    facts |= machine_facts(report["machine"]) | {"Begun": escape(report["created"])}
    return document(Both("Evaluation", "评测"), [table(heads, cells, caption), plots(_charts(report)), how(facts)], report)


def _charts(report: dict[str, Any]) -> list[Chart]:
    charts = []
    for task in dict.fromkeys(t["task"] for t in report["models"][0]["tasks"]):
        points = [[(t["length"], 100 * t["right"]) for t in m["tasks"] if t["task"] == task] for m in report["models"]]
        meaning = Both("Right answers against the length of the prompt.", "答对的比例，横轴为提示长度。")
        heading = Heading(f"task-{task}", _TITLES[task], meaning)
        right = Axis(Both("right, %", "答对，%"), linear([0, 100]), tick)
        charts.append(_chart(heading, report, points, right, lambda share: percent(share / 100)))
    for key, title, label, write, say in (
        ("state_bytes", Both("State of a sequence", "一个序列的状态"), "bytes", memory_tick, memory),
        ("tokens_per_s", Both("Speed", "速度"), Both("tokens/s", "token/秒"), tick, figure),
    ):
        points = [[(d["length"], d[key]) for d in m["decoding"]] for m in report["models"]]
        if any(points):
            values = [y for line in points for _, y in line]
            scale = logarithmic(values, base=2) if key == "state_bytes" else linear(values, zero=True)
            meaning = Both(f"{title.en} after a prompt of this length.", f"读完这一长度的提示之后的{title.zh}。")
            heading = Heading(key, title, meaning)
            charts.append(_chart(heading, report, points, Axis(label, scale, write), say))
    return charts


def _chart(
    heading: Heading, report: dict[str, Any], points: Sequence[Sequence[tuple[float, float]]], y: Axis, say: Callable[[float], str]
) -> Chart:
    series = [Series(name, line, i) for i, (name, line) in enumerate(zip(names(report), points, strict=True))]
    last = [(name, line[-1][1]) for name, line in zip(names(report), points, strict=True) if line]
    told = [Both(f"{both(name).en} {say(value)}", f"{both(name).zh} {say(value)}") for name, value in last]
    found = Both(f"At the longest: {', '.join(t.en for t in told)}.", f"最长时：{'，'.join(t.zh for t in told)}。")
    x = Axis("tokens", logarithmic([p for line in points for p, _ in line], base=2), tokens)
    return line_chart(heading, found, series, x, y)


def _written(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
