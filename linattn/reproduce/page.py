"""report.html of a study: the question, the table with the claims of the papers, the plots, and the conditions of the measurement."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any

from linattn.experiment.study import Study, shown
from linattn.report.html import document, how, machine_facts, named, plots, section, table
from linattn.report.language import Both, Words, both, markup, spoken
from linattn.reproduce import variants


def page(report: dict, study: Study, settings: Any, counts: tuple[int, int]) -> str:
    """Render the page for ``report``, the content of report.json; ``counts`` are the finished and the requested runs."""
    parts = [_opening(report, counts), _table(report, study)]
    if report["rows"] and (drawn := study.charts(settings, report["rows"])):
        parts.append(plots(drawn))
    return document(study.title, [*parts, _remarks(report), how(_facts(report, counts))], report)


def _opening(report: dict, counts: tuple[int, int]) -> str:
    question, command = both(report["question"]), f"<code>{escape(report['command'])}</code>"
    done, wanted = (f"{count:,}" for count in counts)
    missing = Both("", "")
    if not report["complete"]:
        missing = Both(
            f" <b>{done} of {wanted} runs are done; the same command does the rest.</b>",
            f"<b>已完成 {done} / {wanted} 次运行；同一命令可继续。</b>",
        )
    made = markup(Both(f"Made by {command}.", f"由 {command} 生成。"), kind="soft")
    return markup(Both(escape(question.en) + missing.en, escape(question.zh) + missing.zh)) + made


def _table(report: dict, study: Study) -> str:
    first, *others = shown(study.all_columns, report["rows"]) if report["rows"] else study.all_columns
    names = list(dict.fromkeys(str(row.get("mixer")) for row in report["rows"]))
    rows = []
    for row in report["rows"]:
        name = named(variants.label(row["mixer"]), names.index(row["mixer"])) if first.key == "mixer" else spoken(first.cell(row))
        rows.append((name, [c.cell(row) for c in others]))
    caption = Both("Mean ± sample standard deviation over the seeds, where there are several.", "有多个种子时为各种子的均值 ± 样本标准差。")
    return section(Both("Figures", "数据"), table([c.heading for c in (first, *others)], rows, caption))


def _remarks(report: dict) -> str:
    left = [f"Left out: {said}" for said in left_out(report)]
    failed = [Both(f"Failed: {said}", f"失败：{said}") for said in (f"{_said(x['run'])}: {x['error']}" for x in report["failures"])]
    notes = "".join(spoken(note, "li") for note in (*report["notes"], *left, *failed))
    return section(Both("Caveats", "注意事项"), f"<ul>{notes}</ul>") if notes else ""


def left_out(report: dict) -> list[str]:
    """Skipped measurements with their reason, once per mixer."""
    counts = Counter((str(x["run"].get("mixer", "all")), x["reason"]) for x in report["left_out"])
    return [f"{variants.label(mixer)}, {count} {'run' if count == 1 else 'runs'}: {why}" for (mixer, why), count in counts.items()]


def _said(run: dict) -> str:
    return ", ".join(f"{k} {v}" for k, v in run.items() if isinstance(v, str | int | float) and k != "device")


def _facts(report: dict, counts: tuple[int, int]) -> dict[Words, Both | str]:
    minutes = f"{sum(r['seconds'] for r in report['runs']) / 60:,.1f}"
    facts: dict[Words, Both | str] = {
        "Command": f"<code>{escape(report['command'])}</code>",
        "Settings": escape(", ".join(f"{k} {_written(v)}" for k, v in report["settings"].items())),
        "Runs": Both(
            f"{counts[0]:,} of {counts[1]:,}, {minutes} minutes of work in all", f"{counts[0]:,} / {counts[1]:,}，共 {minutes} 分钟"
        ),
    }
    for i, machine in enumerate(report["machines"]):
        which = f" {i + 1}" if len(report["machines"]) > 1 else ""
        facts |= {f"{name}{which}": said for name, said in machine_facts(machine).items()}
    return facts | {"Begun": escape(report["created"])}


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return f"({', '.join(f'{k} {_written(v)}' for k, v in value.items())})"
    return " ".join(map(_written, value)) if isinstance(value, list | tuple) else str(value)
