"""The plots of a comparison on text: for each, what it shows in plain words, what came out here, and the drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linattn.report.charts import Chart, line_chart
from linattn.report.plot import Axis, Heading, Series, bars
from linattn.report.scales import Scale, linear, logarithmic
from linattn.report.words import figure, memory, memory_tick, tick, times, tokens


@dataclass(frozen=True)
class Quantity:
    """Something measured at each context: its key in the report and how it is drawn and said."""

    key: str
    title: str
    meaning: str
    unit: str
    scale: Callable[[Sequence[float]], Scale]
    write: Callable[[float], str]
    say: Callable[[float], str]


def _milliseconds(value: float) -> str:
    return f"{figure(value)} ms"


PREFILL = Quantity(
    "prefill_ms",
    "Reading a prompt",
    "The time to read a prompt of this length, before the first new token can be written. Both axes are logarithmic.",
    "milliseconds",
    logarithmic,
    tick,
    _milliseconds,
)
DECODE = Quantity(
    "decode_ms",
    "Writing a token",
    "The time for each new token after a context of this length. Softmax looks back at all of it; a state of constant size "
    "does not notice how long it was.",
    "milliseconds per token",
    logarithmic,
    tick,
    _milliseconds,
)
STATE = Quantity(
    "state_bytes",
    "Memory of the past",
    "What must be kept of the context to go on. A key-value cache grows by the same amount with each token; a state does not.",
    "bytes",
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
    meaning = "Bits that a model needs for a byte of text it has not seen; lower is better. All read the same data in the same order."
    found = ", ".join(f"{m['name']} {_bits(m):.3f}" for m in sorted(report["mixers"], key=_bits))
    return _learning(report, "step", Heading("learning-step", "Learning per step", meaning), f"At the end: {found}.", "optimizer steps")


def learning_per_second(report: dict) -> Chart:
    """Validation bits per byte over seconds of training."""
    meaning = "The same over the time that training took on this machine: a line that ends further left was done sooner."
    found = ", ".join(f"{m['name']} {figure(_seconds(m))} s" for m in sorted(report["mixers"], key=_seconds))
    heading = Heading("learning-seconds", "Learning per second", meaning)
    return _learning(report, "seconds", heading, f"Done after: {found}.", "seconds of training")


def over_context(report: dict, quantity: Quantity) -> Chart:
    """``quantity`` over the tokens of context."""
    measured = [(i, m) for i, m in enumerate(report["mixers"]) if m["contexts"]]
    series = [Series(m["name"], [(c["context"], c[quantity.key]) for c in m["contexts"]], i) for i, m in measured]
    if quantity is STATE and all(m["name"] != "softmax" for _, m in measured):
        cache = [(c["context"], c["bytes"]) for c in report["key_value_cache"]]
        series.append(Series("softmax cache", cache, len(report["mixers"])))
    x = Axis("tokens of context", logarithmic([p[0] for s in series for p in s.points], base=2), tokens)
    y = Axis(quantity.unit, quantity.scale([p[1] for s in series for p in s.points]), quantity.write)
    heading = Heading(quantity.key.replace("_", "-"), quantity.title, quantity.meaning)
    return line_chart(heading, _ends(series, quantity.say), series, x, y)


def training(report: dict) -> Chart:
    """Tokens per second of training."""
    title, meaning = "Training speed", "Tokens learned from per second on this machine; higher is better."
    values = [(m["name"], m["training"]["tokens_per_second"], i) for i, m in enumerate(report["mixers"])]
    found = f"With {report['options']['batch_size']} sequences of {report['options']['train_context']:,} tokens in a step."
    listed = ", ".join(f"{name} {figure(value)}" for name, value, _ in values)
    svg = bars(Heading("training", title, f"{meaning} {listed}."), values, lambda v: f"{figure(v)} tokens/s")
    return Chart(title, meaning, found, svg)


def _learning(report: dict, over: str, heading: Heading, found: str, label: str) -> Chart:
    limit = _first_tenth(report)
    series = [Series(m["name"], [(h[over], _loss(h)) for h in _curve(m) if _loss(h) <= limit], i) for i, m in enumerate(report["mixers"])]
    y = Axis("bits per byte", linear(p[1] for s in series for p in s.points), tick)
    x = Axis(label, linear((p[0] for s in series for p in s.points), zero=True), tick)
    return line_chart(heading, found, series, x, y)


def _ends(series: list[Series], say: Callable[[float], str]) -> str:
    """A sentence on the values at the longest context that several were measured at."""
    reached = sorted({p[0] for s in series for p in s.points})
    at = next((c for c in reversed(reached) if sum(c in dict(s.points) for s in series) > 1), reached[-1])
    values = sorted((dict(s.points)[at], s.name) for s in series if at in dict(s.points))
    listed = ", ".join(f"{name} {say(value)}" for value, name in values)
    (low, _), (high, _) = values[0], values[-1]
    return f"At {at:,} tokens: {listed}" + (f"; the most is {times(high / low)} the least." if high > low else ".")


def _curve(mixer: dict) -> list[dict]:
    """The entries of the history at which the model was evaluated."""
    return [h for h in mixer["training"]["history"] if h.get("validation_bits_per_byte") is not None]


def _first_tenth(report: dict) -> float:
    """The largest loss still drawn, so that the fall from 8 bits hides nothing.

    It is the worst at the first evaluation after a tenth of the steps, or a model's last.
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
