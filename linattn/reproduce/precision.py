"""Precision: errors of states in bfloat16 or float16, and times to restore caches and states from storage.

Three measurements. *Errors*: the float64 recurrence with its state rounded after every token, or every 64 as if stored between chunks,
against no rounding, by length and decay. *Recall*: models trained on multi-query associative recall, tested with states rounded in the
same ways. *Bringing back*: a softmax cache and the states of the same stack are restored to the model's memory from the accelerator's
memory, main memory and a disk.

Expected errors: rounding adds a relative error of at most u = 2⁻ᵖ (p = 8, 11, 24 bits) at each step, which decays with the state.
Without decay a state of random values grows as √t and its errors as t, so that their ratio grows as u √t; with a decay α it stays at
about u / √(1 - α²). Rounding every 64 tokens divides the former by √64. The delta rule also erases errors: a key of K channels
overwrites 1/K of the state, so that its errors stop growing after about K tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn import linear_attention
from linattn.experiment.study import Column, Done, Result, Row, Run, Study, grouped, mean_and_spread, share
from linattn.models import LanguageModel
from linattn.report.charts import Chart
from linattn.report.plot import Heading
from linattn.report.scales import logarithmic
from linattn.report.words import figure, memory, tokens
from linattn.reproduce import variants
from linattn.reproduce.charts import Measure, curves, share_of
from linattn.reproduce.storage import PLACES, brought, disk, filled
from linattn.reproduce.training import Stack, on_recall
from linattn.state import State
from linattn.tasks import Examples

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {"float32": 24, "bfloat16": 8, "float16": 11}  # bits of the significand
DECAYS = (1.0, 0.999, 0.99, 0.9)  # α per token
SHOWN = (1.0, 0.99)  # decays in the table and the plots
_SAID = {"paper_says": "what servers keep states in unless told otherwise", "source": "SGLang, --mamba-ssm-dtype"}
RULES = ("additive", "delta")
LATEST = 64  # number of latest outputs in an error


@dataclass(frozen=True)
class Settings:
    """States [``size``, ``size``] over ``length`` tokens, rounded after each ``every`` of them; ``recall`` and ``stack`` as below.

    ``stack``: layers, dim, heads and kv_heads of the softmax whose bfloat16 cache is restored, for each of the contexts.
    """

    mixers: tuple[str, ...]
    seeds: int
    size: int
    length: int
    every: tuple[int, ...]
    recall: dict[str, Any]
    stack: dict[str, Any]


QUICK = Settings(
    mixers=("deltanet", "deltanet:negative_eigenvalues=true"), seeds=3, size=32, length=8192, every=(1, 64),
    recall={"lengths": [[32, 4], [64, 8]], "vocab_size": 128, "examples": 32768, "epochs": 1, "batch_size": 32,
            "learning_rate": 5e-3, "dim": 64, "layers": 1, "ffn_dim": 64},
    stack={"layers": 8, "dim": 1024, "heads": 16, "kv_heads": 4, "contexts": [1024, 4096, 16384]},
)  # fmt: skip
FULL = Settings(
    mixers=("mamba2", "deltanet", "gated_deltanet", "kda"), seeds=3, size=64, length=32768, every=(1, 64),
    recall={"lengths": [[64, 4], [128, 8], [256, 16], [256, 32]], "vocab_size": 8192, "examples": 40000, "epochs": 8, "batch_size": 256,
            "learning_rate": 1e-3, "tie_embeddings": True, "dim": 128, "layers": 1, "ffn_dim": 128},
    stack={"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "contexts": [4096, 16384, 65536]},
)  # fmt: skip


def runs(settings: Settings, done: Done) -> list[Run]:
    """Errors and recall for each seed; restoring last, since it measures times."""
    wanted: list[Run] = []
    for seed in range(settings.seeds):
        same = {"size": settings.size, "length": settings.length, "seed": seed}
        wanted += [{"kind": "errors", "mixer": rule, "every": every, **same} for rule in RULES for every in settings.every]
        wanted += [{"kind": "recall", "mixer": m, "every": list(settings.every), **settings.recall, "seed": seed} for m in settings.mixers]
    if len(done) < len(wanted):
        return wanted
    return [*wanted, {"kind": "bring", "mixers": list(settings.mixers), **settings.stack}]


def measure(run: Run) -> Generator[None, None, Result]:
    """Run one of the three measurements."""
    if run["kind"] == "errors":
        return errors(run["mixer"], run["size"], run["length"], run["every"], seed=run["seed"])
    if run["kind"] == "recall":
        return (yield from _recall(run))
    return _bring(run)


@torch.inference_mode()
def errors(rule: str, size: int, length: int, every: int, *, seed: int) -> Result:
    """``tokens``, doubling lengths, and for each dtype a list over DECAYS of the errors at these lengths.

    An error is ‖o - o'‖ / ‖o‖ of the latest outputs, with o' from a state rounded to the dtype after each ``every`` tokens.
    Queries, keys and values are Gaussian, keys and queries of unit length; the delta rule has β = 1.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, length, 1, size, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    outputs = rounded_outputs(q, k, v, delta=rule == "delta", every=every)
    lengths = [n for i in range(length.bit_length()) if LATEST <= (n := 1 << i) <= length] or [length]
    found: dict[str, list[list[float]]] = {name: [[] for _ in DECAYS] for name in DTYPES}
    for n in lengths:
        exact, *others = outputs[:, max(n - LATEST, 0) : n].transpose(1, 2)  # each [decays, tokens, V]
        for name, other in zip(DTYPES, others, strict=True):
            error = (other - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
            for i, value in enumerate(error.tolist()):
                found[name][i].append(value)
    return {"tokens": lengths, **found}


def rounded_outputs(q: Tensor, k: Tensor, v: Tensor, *, delta: bool, every: int) -> Tensor:
    """Outputs [1 + dtypes, T, decays, V] for q, k, v [1, T, 1, ...] float64: row 0 without rounding, the others with states in DTYPES."""
    rows, heads = 1 + len(DTYPES), len(DECAYS)
    q, k, v = (t.expand(rows, -1, heads, -1) for t in (q, k, v))
    decay = torch.tensor(DECAYS, dtype=q.dtype).log()
    beta = torch.ones(rows, q.shape[1], heads, dtype=q.dtype) if delta else None
    state, outputs = None, []
    for start in range(0, q.shape[1], every):
        piece = slice(start, start + every)
        o, state = linear_attention(
            q[:, piece], k[:, piece], v[:, piece], decay=decay, beta=None if beta is None else beta[:, piece],
            scale=1.0, initial_state=state, return_state=True,
        )  # fmt: skip
        state = torch.stack([state[0], *(s.to(d).to(s.dtype) for s, d in zip(state[1:], DTYPES.values(), strict=True))])
        outputs.append(o)
    return torch.cat(outputs, 1)


def _recall(run: Run) -> Generator[None, None, Result]:
    """``exact``: accuracy; by dtype a list of accuracies with states rounded after each of run["every"] tokens."""
    model, unseen = yield from on_recall(Stack.of(run["mixer"]), run)
    language, unseen = model.language.eval(), unseen.to(run["device"])
    rounded = {name: [answered(language, unseen, every, dtype) for every in run["every"]] for name, dtype in DTYPES.items()}
    return {"exact": answered(language, unseen, unseen.ids.shape[1], None), **rounded}


@torch.inference_mode()
def answered(model: LanguageModel, examples: Examples, every: int, dtype: torch.dtype | None) -> float:
    """Accuracy of ``model`` with states rounded to ``dtype`` after each ``every`` tokens."""
    state, found = None, []
    for start in range(0, examples.ids.shape[1], every):
        logits, state = model(examples.ids[:, start : start + every], state, return_state=True)
        state = state if dtype is None else stored(state, dtype)
        found.append(logits.argmax(-1))
    places, answers = examples.asked()
    return (torch.cat(found, 1).gather(1, places) == answers).double().mean().item()


def stored(state: State, dtype: torch.dtype) -> State:
    """Round ``state`` to ``dtype`` and back, except integer positions."""
    return State([{k: t.to(dtype).to(t.dtype) if t.is_floating_point() else t for k, t in layer.items()} for layer in state.layers])


def _bring(run: Run) -> Result:
    """``cache``: for each context bytes and seconds by storage; ``states``: the same for each mixer; ``disk``: its file system."""
    sizes = {name: run[name] for name in ("layers", "dim")}
    softmax = {name: run[name] for name in ("heads", "kv_heads")}
    with disk() as (folder, kind):
        caches = [{"context": n, **brought(filled("softmax", n, **sizes, **softmax), run["device"], folder)} for n in run["contexts"]]
        states = {}
        for mixer in run["mixers"]:
            variant = variants.parse(mixer)
            states[mixer] = brought(filled(variant.name, 1, **sizes, **variant.options), run["device"], folder)
    return {"cache": caches, "states": states, "disk": kind}


def rows(_settings: Settings, done: Done) -> list[Row]:
    """Rows of the errors at the full length, of recall, and of the times to restore."""
    by = {kind: [one for one in done if one[0]["kind"] == kind] for kind in ("errors", "recall", "bring")}
    table = [*_error_rows(by["errors"]), *_recall_rows(by["recall"])]
    for run, result in by["bring"]:
        if "left_out" not in result:
            table += _brought_rows(run, result)
    return table


def _error_rows(done: Done) -> Iterator[Row]:
    """A row for each rule, dtype and interval of rounding; "curve" holds the errors by length and decay."""
    for (rule, every), group in grouped(done, "mixer", "every").items():
        lengths = group[0][1]["tokens"]
        for name in DTYPES:
            curve = [
                {"tokens": n, "decay": decay, **mean_and_spread("error", (result[name][i][j] for _, result in group))}
                for i, decay in enumerate(DECAYS)
                for j, n in enumerate(lengths)
            ]
            ends = {p["decay"]: p for p in curve if p["tokens"] == lengths[-1]}
            last = {
                f"{key}{end}": ends[decay][f"error{end}"]
                for key, decay in zip(("error", "error_faded"), SHOWN, strict=True)
                for end in ("", "_spread")
            }
            yield {
                "mixer": rule,
                "dtype": name,
                "every": every,
                "tokens": lengths[-1],
                **last,
                "curve": curve,
                **(_SAID if name == "float32" else {}),
            }


def _recall_rows(done: Done) -> Iterator[Row]:
    for (mixer,), group in grouped(done, "mixer").items():
        exact = mean_and_spread("exact", (result["exact"] for _, result in group))
        for name in DTYPES:
            for i, every in enumerate(group[0][0]["every"]):
                recalled = mean_and_spread("recall", (result[name][i] for _, result in group))
                tokens = group[0][0]["lengths"][-1][0]
                yield {"mixer": mixer, "dtype": name, "every": every, "tokens": tokens, **recalled, **exact}


def _brought_rows(run: Run, result: Result) -> Iterator[Row]:
    caches = [{"mixer": "softmax", "dtype": "bfloat16", "tokens": one["context"], **_places(one)} for one in result["cache"]]
    longest = max(run["contexts"])
    states = [{"mixer": m, "dtype": "float32", "tokens": longest, **_places(result["states"][m])} for m in run["mixers"]]
    for row in (*caches, *states):
        yield {**row, "disk_is": result["disk"]}


def _places(one: Result) -> Row:
    """Bytes, and for each available storage the seconds and the bytes per second."""
    known = {place: one[place] for place in PLACES if one[place] is not None}
    return {"bytes": one["bytes"], **known, **{f"{place}_rate": one["bytes"] / seconds for place, seconds in known.items()}}


def charts(settings: Settings, table: list[Row]) -> list[Chart]:
    """Plots of errors by length for each rule and interval of rounding, recall by precision, and times to restore."""
    drawn = [_error_chart(rule, every, table) for rule in RULES for every in settings.every]
    drawn += [_recall_chart(table, settings.every[0]), _bring_chart([row for row in table if row.get("bytes") is not None])]
    return [chart for chart in drawn if chart is not None]


_ACROSS = Measure("tokens", "tokens", lambda values: logarithmic(values, base=2), tokens)


def _error_chart(rule: str, every: int, table: list[Row]) -> Chart | None:
    shown = [row for row in table if row["mixer"] == rule and row["every"] == every]
    points = [{**p, "name": f"{row['dtype']}, {p['decay']:g}"} for row in shown for p in row["curve"] if p["decay"] in SHOWN and p["error"]]
    heading = Heading(
        f"error-{rule}-{every}",
        f"Error, {rule}, rounded after {_often(every)}",
        f"Relative error of the latest {LATEST} outputs, without decay (1) and with a decay of {SHOWN[1]:g} per token.",
    )
    ends = ", ".join(f"{row['dtype']} {_power(row['error'])}" for row in shown if row["error"] is not None)
    measured = Measure("error", "relative error", logarithmic, _power)
    return curves(heading, points, _ACROSS, measured, by="name", found=f"Without decay at the full length: {ends}.")


def _recall_chart(table: list[Row], every: int) -> Chart | None:
    shown = [{**row, "bits": BITS[row["dtype"]]} for row in table if row.get("recall") is not None and row["every"] == every]
    meaning = f"Share of questions that a trained model answers with its state rounded after {_often(every)}."
    bits = Measure("bits", "bits of the significand", lambda values: logarithmic(values, base=2), lambda b: f"{b:g}")
    lost = max((row["exact"] - row["recall"] for row in shown), default=0.0)
    found = f"bfloat16 has 8 bits, float16 11, float32 24. Rounding costs at most {lost:.3f}."
    return curves(Heading("recall", "Recall", meaning), shown, bits, share_of("recall", "share answered"), found=found)


def _bring_chart(table: list[Row]) -> Chart | None:
    """Plot of times over contexts; the time of a state is the same for all."""
    contexts = [row["tokens"] for row in table if row["mixer"] == "softmax"]
    points, longest = [], {}
    for row in table:
        for place in (p for p in PLACES if p in row):
            name, ms = f"{variants.label(row['mixer'])}, {place}", 1e3 * row[place]
            points += [{"name": name, "tokens": n, "ms": ms} for n in ([row["tokens"]] if row["mixer"] == "softmax" else contexts)]
            longest[name] = ms  # the longest cache comes last
    heading = Heading("bring", "Restoring", "Time to copy a softmax cache, or a state instead, to the memory in which the model computes.")
    found = f"Milliseconds after the longest context: {', '.join(f'{name} {figure(ms)}' for name, ms in longest.items())}."
    return curves(heading, points, _ACROSS, Measure("ms", "milliseconds", logarithmic), by="name", found=found)


def _often(every: int) -> str:
    return "every token" if every == 1 else f"every {every} tokens"


def _power(value: float) -> str:
    return f"{value:.1e}"


def _milliseconds(seconds: float) -> str:
    return figure(1e3 * seconds)


def _gigabytes(rate: float) -> str:
    return figure(rate / 1e9)


STUDY = Study(
    title="States of half the precision, and where they lie",
    question="How large is the error of a state that is rounded after every token, or whenever it is stored between chunks, by length and "
    "decay, and how does it affect recall? And how long does it take to restore a key-value cache and a state from each kind of storage?",
    quick=QUICK,
    full=FULL,
    runs=runs,
    measure=measure,
    rows=rows,
    columns=(
        Column("mixer", "rule or mixer"), Column("dtype", "kept in"), Column("every", "rounded every"),
        Column("tokens", "tokens", lambda n: f"{n:,}"), Column("error", "error without decay", _power, spread=True),
        Column("error_faded", f"error with decay {SHOWN[1]:g}", _power, spread=True), Column("recall", "recall", share, spread=True),
        Column("bytes", "bytes", memory), *(Column(place, f"from {place}, ms", _milliseconds) for place in PLACES),
        *(Column(f"{place}_rate", f"{place}, GB/s", _gigabytes) for place in PLACES),
    ),
    charts=charts,
    notes=(
        "Errors come from rounding the state alone, all other arithmetic being float64; keys and values are random.",
        "A model that has not learned to recall loses nothing by rounding.",
        "Bytes per second count the cache or state once; a copy within one memory reads and writes each byte, on a CPU with one thread.",
        "The disk is read with the page cache of this system empty; the host of a virtual machine may have a cache of its own.",
        "Copies from memory to an accelerator use pinned memory. Caches and states are those of the bfloat16 stack in the settings.",
    ),
)  # fmt: skip
