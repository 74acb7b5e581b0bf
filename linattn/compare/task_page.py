"""report.html of a comparison on a task: the figures, the plots, and the conditions of the measurement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from linattn.compare.tasks import Task
from linattn.experiment.study import Row
from linattn.report.charts import Chart, line_chart
from linattn.report.html import document, how, machine_facts, measured_by, named, papers, plots, section, table
from linattn.report.language import Both, Words, both, listing, markup, spoken
from linattn.report.plot import Axis, Heading, Series, bars
from linattn.report.scales import linear
from linattn.report.words import figure, tick


def page(report: dict, task: Task) -> str:
    """Render the page for ``report``, the content of report.json."""
    return document(
        report["title"], (_opening(report), _figures(report, task), plots(charts(report["mixers"], task)), _how(report)), report
    )


def charts(rows: Sequence[Row], task: Task) -> list[Chart]:
    """Plots of the first figure in training, over steps and seconds, and of all final figures."""
    learning = [
        _learning(rows, task, "step", Both("steps", "步数")),
        _learning(rows, task, "seconds", Both("seconds of training", "训练时间（秒）")),
    ]
    return [*learning, *(_bars(rows, task, i) for i in range(len(task.figures)))]


def _opening(report: dict) -> str:
    o, m = report["options"], report["mixers"]
    question, measured = both(report["question"]), measured_by(report)
    means = Both("", "") if o["seeds"] == 1 else Both(f"Means over {o['seeds']} seeds. ", f"数值为 {o['seeds']} 个种子的均值。")
    layers = "1 layer" if o["layers"] == 1 else f"{o['layers']} layers"
    size, steps, batch = figure(m[0]["parameters"]), f"{o['steps']:,}", o["batch_size"]
    told = Both(
        f"{escape(question.en)} All models have about {size} parameters, {layers} of width {o['dim']} and {steps} steps of {batch} examples.",
        f"{escape(question.zh)}各模型约有 {size} 个参数，{o['layers']} 层，宽度 {o['dim']}，训练 {steps} 步，每步 {batch} 个样本。",
    )
    return markup(told) + markup(Both(means.en + measured.en, means.zh + measured.zh), kind="soft")


def cells(row: dict, task: Task) -> list[str]:
    """Cells of a mixer's row: parameters, the figures with their spread, seconds of training."""
    return [f"{row['parameters']:,}", *(f.cell(row) for f in task.figures), figure(seconds(row))]


def reference_cells(told: dict[str, float], task: Task) -> list[str]:
    """Cells of the row of a baseline without a model."""
    return ["–", *(f.write(told[f.key]) if f.key in told else "–" for f in task.figures), "–"]


def heads(task: Task) -> list[str]:
    """The headings above :func:`cells`, and above the mixer's name."""
    return ["mixer", "parameters", *(f.heading for f in task.figures), "training, s"]


def seconds(row: dict) -> float:
    """Seconds of the training of one model, the mean over the seeds."""
    return statistics.fmean(run["seconds"] for run in row["runs"])


def _figures(report: dict, task: Task) -> str:
    rows = [(named(m["name"], i), cells(m, task)) for i, m in enumerate(report["mixers"])]
    rows += [(spoken(name), reference_cells(told, task)) for name, told in report["data"].get("references", {}).items()]
    caption = Both("Mean ± sample standard deviation over the seeds.", "各种子的均值 ± 样本标准差。")
    return section(Both("Figures", "数据"), table(heads(task), rows, caption))


def _learning(rows: Sequence[Row], task: Task, over: str, label: Both) -> Chart:
    first = task.figures[0]
    name_of = both(first.heading)
    series = [Series(m["name"], _mean_curve(m, over, first.key), i) for i, m in enumerate(rows)]
    value, name = (min if first.lower_is_better else max)((m[first.key], m["name"]) for m in rows)
    found = Both(f"Best at the end: {name}, {first.write(value)}.", f"结束时最好：{name}，{first.write(value)}。")
    meaning = Both(
        f"{name_of.en[0].upper()}{name_of.en[1:]} during training, over {label.en}; the mean over the seeds.",
        f"训练过程中的{name_of.zh}，横轴为{label.zh}；各种子的均值。",
    )
    heading = Heading(f"learning-{over}", Both(f"Learning, over {label.en}", f"学习过程，按{label.zh}"), meaning)
    x = Axis(label, linear((p[0] for s in series for p in s.points), zero=True), tick)
    y = Axis(first.heading, linear(p[1] for s in series for p in s.points), tick)
    return line_chart(heading, found, series, x, y)


def _mean_curve(mixer: dict, over: str, key: str) -> list[tuple[float, float]]:
    histories = zip(*(run["history"] for run in mixer["runs"]), strict=True)  # seeds at the same step
    return [(statistics.fmean(h[over] for h in at), statistics.fmean(h[key] for h in at)) for at in histories]


def _bars(rows: Sequence[Row], task: Task, which: int) -> Chart:
    f = task.figures[which]
    values = [(m["name"], m[f.key], i) for i, m in enumerate(rows)]
    name = both(f.heading)
    title = Both(name.en[0].upper() + name.en[1:], name.zh)
    better = Both("lower", "越低越好") if f.lower_is_better else Both("higher", "越高越好")
    meaning = Both(f"{title.en} of the trained models; {better.en} is better.", f"训练后模型的{title.zh}，{better.zh}。")
    listed = listing(f"{model} {f.write(value)}" for model, value, _ in values)
    found = Both(f"{listed.en}.", f"{listed.zh}。")
    heading = Heading(f"figure-{which}", title, Both(f"{meaning.en} {found.en}", meaning.zh + found.zh))
    return Chart(title, meaning, found, bars(heading, values, f.write))


def _how(report: dict) -> str:
    o, data = report["options"], report["data"]
    seeds = f"{o['seed']}" if o["seeds"] == 1 else f"{o['seed']} – {o['seed'] + o['seeds'] - 1}"
    counts = [(both(key), f"{value:,}") for key, value in data.items() if isinstance(value, int)]
    name, digest = both(data["name"]), f"sha256 <code>{escape(data['sha256'])}</code>"
    listed = Both("".join(f", {n} {escape(key.en)}" for key, n in counts), "".join(f"，{escape(key.zh)} {n}" for key, n in counts))
    facts: dict[Words, Both | str] = {
        "Command": f"<code>{escape(report['command'])}</code>",
        "Data": Both(f"{escape(name.en)}{listed.en}; {digest}", f"{escape(name.zh)}{listed.zh}；{digest}"),
        "Training": Both(
            f"AdamW, {o['steps']:,} steps of {o['batch_size']} examples, learning rate {o['learning_rate']:g}, weight decay "
            f"{o['weight_decay']:g}, seeds {seeds}, float32",
            f"AdamW，{o['steps']:,} 步，每步 {o['batch_size']} 个样本，学习率 {o['learning_rate']:g}，权重衰减 "
            f"{o['weight_decay']:g}，种子 {seeds}，float32",
        ),
        **({"Note": " ".join(map(spoken, notes))} if (notes := data.get("notes")) else {}),
        **machine_facts(report["machine"]),
        "Made": escape(report["created"]),
        "Mixers": papers(report["mixers"]),
    }
    return how(facts)
