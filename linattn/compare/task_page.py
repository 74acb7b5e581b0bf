"""report.html of a comparison on a task: the figures, how they came about, and how they were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from linattn.compare.tasks import Task
from linattn.experiment.study import Row
from linattn.report.charts import Chart, line_chart
from linattn.report.html import document, how, machine_facts, measured_by, named, papers, plots, table
from linattn.report.plot import Axis, Heading, Series, bars
from linattn.report.scales import linear
from linattn.report.words import figure, tick


def page(report: dict, task: Task) -> str:
    """The whole page for ``report`` (what report.json holds)."""
    return document(
        report["title"], (_opening(report), _figures(report, task), plots(charts(report["mixers"], task)), _how(report)), report
    )


def charts(rows: Sequence[Row], task: Task) -> list[Chart]:
    """The first figure while the models learn, over steps and over seconds, and all figures at the end."""
    learning = [_learning(rows, task, "step", "steps"), _learning(rows, task, "seconds", "seconds of training")]
    return [*learning, *(_bars(rows, task, i) for i in range(len(task.figures)))]


def _opening(report: dict) -> str:
    o, m = report["options"], report["mixers"]
    means = "" if o["seeds"] == 1 else f"Means over {o['seeds']} seeds. "
    layers = "1 layer" if o["layers"] == 1 else f"{o['layers']} layers"
    return (
        f"<p>{escape(report['question'])} All have about {figure(m[0]['parameters'])} parameters, {layers} of width {o['dim']} "
        f"and {o['steps']:,} steps of {o['batch_size']} examples, the same for all.</p>"
        f'<p class="soft">{means}{measured_by(report)}</p>'
    )


def cells(row: dict, task: Task) -> list[str]:
    """The cells of a mixer's row: parameters, the figures with their spread, seconds of training."""
    return [f"{row['parameters']:,}", *(f.cell(row) for f in task.figures), figure(seconds(row))]


def reference_cells(told: dict[str, float], task: Task) -> list[str]:
    """The same of what is no model and was not trained."""
    return ["–", *(f.write(told[f.key]) if f.key in told else "–" for f in task.figures), "–"]


def heads(task: Task) -> list[str]:
    """The headings above :func:`cells`, and above the mixer's name."""
    return ["mixer", "parameters", *(f.heading for f in task.figures), "training, s"]


def seconds(row: dict) -> float:
    """Seconds of the training of one model, the mean over the seeds."""
    return statistics.fmean(run["seconds"] for run in row["runs"])


def _figures(report: dict, task: Task) -> str:
    rows = [(named(m["name"], i), cells(m, task)) for i, m in enumerate(report["mixers"])]
    rows += [(escape(name), reference_cells(told, task)) for name, told in report["data"].get("references", {}).items()]
    return "<h2>The figures</h2>" + table(heads(task), rows, "Mean ± sample standard deviation over the seeds.")


def _learning(rows: Sequence[Row], task: Task, over: str, label: str) -> Chart:
    first = task.figures[0]
    series = [Series(m["name"], _mean_curve(m, over, first.key), i) for i, m in enumerate(rows)]
    value, name = (min if first.lower_is_better else max)((m[first.key], m["name"]) for m in rows)
    found = f"Best at the end: {name}, {first.write(value)}."
    meaning = f"{first.heading.capitalize()} while the models learn, over {label}; the mean over the seeds."
    heading = Heading(f"learning-{over}", f"Learning, over {label}", meaning)
    x = Axis(label, linear((p[0] for s in series for p in s.points), zero=True), tick)
    y = Axis(first.heading, linear(p[1] for s in series for p in s.points), tick)
    return line_chart(heading, found, series, x, y)


def _mean_curve(mixer: dict, over: str, key: str) -> list[tuple[float, float]]:
    histories = zip(*(run["history"] for run in mixer["runs"]), strict=True)  # seeds at the same step
    return [(statistics.fmean(h[over] for h in at), statistics.fmean(h[key] for h in at)) for at in histories]


def _bars(rows: Sequence[Row], task: Task, which: int) -> Chart:
    f = task.figures[which]
    values = [(m["name"], m[f.key], i) for i, m in enumerate(rows)]
    meaning = f"{f.heading[0].upper()}{f.heading[1:]} of the trained models; {'lower' if f.lower_is_better else 'higher'} is better."
    found = ", ".join(f"{name} {f.write(value)}" for name, value, _ in values) + "."
    heading = Heading(f"figure-{which}", f.heading[0].upper() + f.heading[1:], f"{meaning} {found}")
    return Chart(heading.title, meaning, found, bars(heading, values, f.write))


def _how(report: dict) -> str:
    o, data = report["options"], report["data"]
    seeds = f"seed {o['seed']}" if o["seeds"] == 1 else f"seeds {o['seed']} to {o['seed'] + o['seeds'] - 1}"
    others = ", ".join(f"{value:,} {key}" for key, value in data.items() if isinstance(value, int))
    facts = {
        "Command": f"<code>{escape(report['command'])}</code>",
        "Data": f"{escape(data['name'])}{': ' + escape(others) if others else ''}; sha256 <code>{escape(data['sha256'])}</code>",
        "Training": f"AdamW, {o['steps']:,} steps of {o['batch_size']} examples, learning rate {o['learning_rate']:g}, weight decay "
        f"{o['weight_decay']:g}, {seeds}, float32",
        **({"Note": " ".join(map(escape, notes))} if (notes := data.get("notes")) else {}),
        **machine_facts(report["machine"]),
        "Made": escape(report["created"]),
        "Mixers": papers(report["mixers"]),
    }
    return how(facts)
