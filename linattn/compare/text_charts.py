"""Plots of a comparison on text, each with a description and a sentence on its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linattn.report.charts import Chart, line_chart
from linattn.report.language import Both, listing
from linattn.report.plot import Axis, Heading, Series, bars
from linattn.report.scales import Scale, linear, logarithmic
from linattn.report.words import figure, memory, memory_tick, tick, times, tokens
from linattn.reproduce.variants import label


@dataclass(frozen=True)
class Quantity:
    """Quantity measured at each context: its key in the report, and its format in plots and sentences."""

    key: str
    title: Both
    meaning: Both
    unit: Both
    scale: Callable[[Sequence[float]], Scale]
    write: Callable[[float], str]
    say: Callable[[float], str]


def _milliseconds(value: float) -> str:
    return f"{figure(value)} ms"


PREFILL = Quantity(
    "prefill_ms",
    Both("Reading a prompt", "读入提示"),
    Both(
        "Time to read a prompt of this length, before the first new token. Both axes are logarithmic.",
        "读入这一长度的提示、写出第一个新 token 之前所需的时间。两轴均为对数。",
    ),
    Both("milliseconds", "毫秒"),
    logarithmic,
    tick,
    _milliseconds,
)
DECODE = Quantity(
    "decode_ms",
    Both("Writing a token", "写出一个 token"),
    Both(
        "Time for each new token after a context of this length. Softmax reads all of the context again; a state has one size.",
        "这一长度的上下文之后，每个新 token 所需的时间。softmax 要重读整个上下文，而状态大小固定。",
    ),
    Both("milliseconds per token", "毫秒/token"),
    logarithmic,
    tick,
    _milliseconds,
)
STATE = Quantity(
    "state_bytes",
    Both("Memory of the past", "为历史保留的内存"),
    Both(
        "Bytes kept of the context in order to continue. A key-value cache grows by the same amount with each token, a state does not.",
        "为继续生成而保留的字节数。KV 缓存随每个 token 等量增长，状态则不增长。",
    ),
    Both("bytes", "字节"),
    lambda values: logarithmic(values, base=2),
    memory_tick,
    memory,
)


def charts(report: dict) -> list[Chart]:
    """All plots of ``report``, in reading order."""
    learned = [learning_per_step(report), learning_per_second(report)] if all(_curve(m) for m in report["mixers"]) else []
    return [*learned, *(over_context(report, q) for q in (PREFILL, DECODE, STATE)), training(report)]


def learning_per_step(report: dict) -> Chart:
    """Validation bits per byte over optimizer steps."""
    meaning = Both(
        "Bits that a model needs for a byte of text it was not trained on; lower is better. All read the same data in the same order.",
        "模型对未参与训练的文本平均每字节所需的比特数，越低越好。所有模型按同样的顺序读同样的数据。",
    )
    listed = listing(f"{label(m['name'])} {_bits(m):.3f}" for m in sorted(report["mixers"], key=_bits))
    heading = Heading("learning-step", Both("Learning per step", "按步数看学习"), meaning)
    found = Both(f"At the end: {listed.en}.", f"训练结束时：{listed.zh}。")
    return _learning(report, "step", heading, found, Both("optimizer steps", "优化步数"))


def learning_per_second(report: dict) -> Chart:
    """Validation bits per byte over seconds of training."""
    meaning = Both(
        "The same over the time that training took on this machine: a line that ends further left took less time.",
        "同样的曲线，横轴换成在这台机器上训练的时间：结束得越靠左，用时越短。",
    )
    listed = listing(f"{label(m['name'])} {figure(_seconds(m))} s" for m in sorted(report["mixers"], key=_seconds))
    heading = Heading("learning-seconds", Both("Learning per second", "按时间看学习"), meaning)
    found = Both(f"Seconds of training: {listed.en}.", f"训练用时：{listed.zh}。")
    return _learning(report, "seconds", heading, found, Both("seconds of training", "训练时间（秒）"))


def over_context(report: dict, quantity: Quantity) -> Chart:
    """``quantity`` over the tokens of context."""
    measured = [(i, m) for i, m in enumerate(report["mixers"]) if m["contexts"]]
    series = [Series(label(m["name"]), [(c["context"], c[quantity.key]) for c in m["contexts"]], i) for i, m in measured]
    if quantity is STATE and all(m["name"].partition(":")[0] != "softmax" for _, m in measured):
        cache = [(c["context"], c["bytes"]) for c in report["key_value_cache"]]
        series.append(Series(Both("softmax cache", "softmax 缓存"), cache, len(report["mixers"])))
    x = Axis(Both("tokens of context", "上下文 token 数"), logarithmic([p[0] for s in series for p in s.points], base=2), tokens)
    y = Axis(quantity.unit, quantity.scale([p[1] for s in series for p in s.points]), quantity.write)
    heading = Heading(quantity.key.replace("_", "-"), quantity.title, quantity.meaning)
    return line_chart(heading, _ends(series, quantity.say), series, x, y)


def training(report: dict) -> Chart:
    """Tokens per second of training."""
    title, meaning = Both("Training speed", "训练速度"), Both(
        "Training tokens per second on this machine; higher is better.", "在这台机器上每秒训练的 token 数，越高越好。"
    )  # fmt: skip
    values = [(label(m["name"]), m["training"]["tokens_per_second"], i) for i, m in enumerate(report["mixers"])]
    batch, context = report["options"]["batch_size"], report["options"]["train_context"]
    found = Both(f"Each step has {batch} sequences of {context:,} tokens.", f"每步 {batch} 条序列，每条 {context:,} 个 token。")
    listed = listing(f"{name} {figure(value)}" for name, value, _ in values)
    heading = Heading("training", title, Both(f"{meaning.en} {listed.en}.", f"{meaning.zh}{listed.zh}。"))
    return Chart(title, meaning, found, bars(heading, values, lambda v: Both(f"{figure(v)} tokens/s", f"{figure(v)} token/秒")))


def _learning(report: dict, over: str, heading: Heading, found: Both, axis: Both) -> Chart:
    limit = _first_tenth(report)
    curves = [(label(m["name"]), [(h[over], _loss(h)) for h in _curve(m) if _loss(h) <= limit]) for m in report["mixers"]]
    series = [Series(name, points, i) for i, (name, points) in enumerate(curves)]
    y = Axis(Both("bits per byte", "每字节比特数"), linear(p[1] for s in series for p in s.points), tick)
    x = Axis(axis, linear((p[0] for s in series for p in s.points), zero=True), tick)
    return line_chart(heading, found, series, x, y)


def _ends(series: list[Series], say: Callable[[float], str]) -> Both:
    """Sentence on the values at the longest context measured for several mixers."""
    reached = sorted({p[0] for s in series for p in s.points})
    at = next((c for c in reversed(reached) if sum(c in dict(s.points) for s in series) > 1), reached[-1])
    values = sorted((dict(s.points)[at], s.name) for s in series if at in dict(s.points))
    listed = listing(f"{name} {say(value)}" for value, name in values)
    (low, _), (high, _) = values[0], values[-1]
    if high <= low:
        return Both(f"At {at:,} tokens: {listed.en}.", f"{at:,} 个 token 处：{listed.zh}。")
    ratio = times(high / low)
    least = f"最大为最小的 {ratio.removesuffix(' times')} 倍"
    return Both(f"At {at:,} tokens: {listed.en}; the most is {ratio} the least.", f"{at:,} 个 token 处：{listed.zh}；{least}。")


def _curve(mixer: dict) -> list[dict]:
    """The entries of the history at which the model was evaluated."""
    return [h for h in mixer["training"]["history"] if h.get("validation_bits_per_byte") is not None]


def _first_tenth(report: dict) -> float:
    """Upper limit of the plotted loss, which cuts off the initial fall from 8 bits.
    It is the worst loss at the first evaluation after a tenth of the steps, or a model's last.
    """
    after = report["options"]["steps"] / 10
    curves = [_curve(m) for m in report["mixers"]]
    return max(max(_loss(next((h for h in c if h["step"] >= after), c[-1])), _loss(c[-1])) for c in curves)


def _loss(entry: dict) -> float:
    return entry["validation_bits_per_byte"]


def _bits(mixer: dict) -> float:
    return mixer["training"]["validation_bits_per_byte"]


def _seconds(mixer: dict) -> float:
    return mixer["training"]["seconds"]
