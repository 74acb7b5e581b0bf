"""Copying strings and induction heads, at lengths beyond those of training (arXiv 2402.01032, 2312.00752).

Copying needs a state that holds the string, an induction head one that holds a token over any distance.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from linattn import mixers, tasks
from linattn.experiment.study import Column, Done, Result, Row, Run, Study, grouped, mean_and_spread, share
from linattn.report.charts import Chart
from linattn.report.plot import Heading
from linattn.report.words import memory, tokens
from linattn.reproduce import synthetic, variants
from linattn.reproduce.charts import curves, in_tokens, share_of
from linattn.reproduce.recall import CONVOLUTION
from linattn.tasks import Examples

SEGMENT = 1 << 14  # tokens read at once; the state is carried over in longer tests
RIGHT = 0.95  # minimum share of right answers of a solved length
MILLION = 1 << 20  # tokens of the longest test in the Mamba paper
LETTERS = 28  # vocabulary of copying: 26 letters, begin, copy


@dataclass(frozen=True)
class Settings:
    """``train``, ``test``: lengths, of strings for "copying", of sequences for "induction"; ``examples``: of each trained length."""

    mixers: tuple[str, ...]
    seeds: int
    train: dict[str, tuple[int, ...]]
    test: dict[str, tuple[int, ...]]
    examples: int
    epochs: int
    dim: int
    batch_size: int
    learning_rate: float
    tests: int


def runs(settings: Settings, _done: Done) -> list[Run]:
    """Runs for each task, mixer and seed."""
    same = {name: getattr(settings, name) for name in ("examples", "epochs", "dim", "batch_size", "learning_rate", "tests")}
    return [
        {"task": task, "mixer": mixer, "seed": seed, "train": settings.train[task], "test": settings.test[task], **same}
        for task in settings.train
        for mixer in settings.mixers
        for seed in range(settings.seeds)
    ]


def examples(task: str, count: int, length: int, generator: torch.Generator) -> Examples:
    """Examples of a task of this study."""
    if task == "copying":
        return tasks.copying(count, length=length, vocab_size=LETTERS, generator=generator)
    return tasks.induction_heads(count, tokens=length, generator=generator)


def measure(run: Run) -> Generator[None, None, Result]:
    """Train at the short lengths; return the share of correct answers and, for copying, of whole strings at every test length."""
    task, generator = run["task"], torch.Generator().manual_seed(run["seed"])
    parts = [examples(task, run["examples"], length, generator) for length in run["train"]]
    shape = {"vocab_size": parts[0].vocab_size, "dim": run["dim"], "layers": 2}
    model = synthetic.build(run["mixer"], run["seed"], before=CONVOLUTION, **shape).to(run["device"])
    recipe = synthetic.Recipe(run["epochs"], run["batch_size"], run["learning_rate"])
    loss = yield from synthetic.train(model, parts, recipe, seed=run["seed"])
    test = copied if task == "copying" else found
    results = {str(n): test(model, run["mixer"], examples(task, run["tests"], n, generator)) for n in run["test"]}
    return {"tests": results, "state_bytes": synthetic.state_bytes(model, parts[-1].ids.shape[1]), "loss": loss}


def copied(model: synthetic.Asked, _mixer: str, test: Examples) -> dict[str, Any]:
    """Shares of correct letters and of strings that greedy decoding reproduces exactly."""
    good = torch.cat([right for right, _ in synthetic.right(model, test, batch_size=64)])
    return {"accuracy": good.double().mean().item(), "whole": good.all(1).double().mean().item()}


def found(model: synthetic.Asked, mixer: str, test: Examples) -> dict[str, Any]:
    """Share of sequences whose last answer is correct; None if the cache would be too large."""
    if not _bounded(variants.parse(mixer)) and test.ids.shape[1] > SEGMENT:
        return {"accuracy": None, "whole": None}
    value = synthetic.last_right(model, test, SEGMENT)
    return {"accuracy": value, "whole": value}


def rows(_settings: Settings, done: Done) -> list[Row]:
    """A row for each task and mixer: at the longest trained length, at twice that and at the longest; "curve": at every one."""
    table = []
    for (task, mixer), group in grouped(done, "task", "mixer").items():
        run, first = group[0]
        at = {"trained": max(run["train"]), "twice": 2 * max(run["train"]), "longest": max(run["test"])}
        row: Row = {
            "mixer": mixer,
            "task": task,
            "state_bytes": first["state_bytes"],
            "seeds": len(group),
            "longest_test": max(run["test"]),
        }
        for name, length in at.items():
            row |= mean_and_spread(name, (result["tests"].get(str(length), {}).get("whole") for _, result in group))
        row["beyond"] = _beyond([result for _, result in group], at["twice"])
        row["curve"] = [{"length": n, **mean_and_spread("whole", (r["tests"][str(n)]["whole"] for _, r in group))} for n in run["test"]]
        table.append({**row, **_paper(row)})
    return table


def _beyond(results: list[Result], length: int) -> float | None:
    """The mean at the longest completed test above ``length``; None if there is none."""
    longer = [n for n, test in results[0]["tests"].items() if int(n) > length and test["whole"] is not None]
    return statistics.fmean(result["tests"][longer[-1]]["whole"] for result in results) if longer else None


def _paper(row: Row) -> Row:
    """Claims of the papers on copying and induction heads. Those on softmax do not extend to other mixers with a growing cache."""
    variant = variants.parse(row["mixer"])
    said = agrees = None
    if row["task"] == "copying":
        source = "arXiv 2402.01032, section 2"
        if _bounded(variant):
            said = "no more than the state can hold"
        elif variant.name == "softmax":
            said = "strings far longer than its size"
    else:
        source = "arXiv 2312.00752, section 4.1"
        if variant.name == "mamba":
            said = "right up to a million tokens"
            agrees = False if row["longest"] < RIGHT else True if row["longest_test"] >= MILLION else None
        elif variant.name == "softmax" and not variant.windowed:
            said, agrees = "right up to twice the trained length at most", None if row["beyond"] is None else row["beyond"] < RIGHT
    return {"paper_says": said, "source": source if said else None, "agrees": agrees}


def _bounded(variant: variants.Variant) -> bool:
    """True if the state of the mixer has a bounded size."""
    return mixers.info(variant.name).recurrent or variant.windowed


def charts(settings: Settings, table: list[Row]) -> list[Chart]:
    """Plots of accuracy over length, for each task."""
    drawn, names = [], [row["mixer"] for row in table]
    for task, title in (("copying", "whole strings copied"), ("induction", "the induction head's answer")):
        shown = [row for row in table if row["task"] == task]
        if not shown:
            continue
        longest = max(settings.train[task])
        meaning = f"Share of correct answers over the length; trained with lengths up to {tokens(longest)}."
        listed = ", ".join(f"{variants.parse(row['mixer']).label} {share(row['twice'])}" for row in shown if row["twice"] is not None)
        points = [{**point, "mixer": row["mixer"]} for row in shown for point in row["curve"]]
        x, y = in_tokens("length", "length"), share_of("whole", "share right")
        drawn.append(
            curves(
                Heading(f"length-{task}", f"{task}: {title}", meaning),
                points,
                x,
                y,
                found=f"At twice the trained length: {listed}.",
                names=names,
            )
        )
    return [chart for chart in drawn if chart is not None]


STUDY = Study(
    title="Copying and induction at unseen lengths",
    question="Models of two layers, a short convolution and a mixer, learn to copy short strings, and to name the token that followed the "
    "last token where it occurred before. Which continue to do so at lengths that they were not trained on?",
    quick=Settings(
        ("softmax", "softmax:window=32", "gla", "mamba", "deltanet"), 3,
        train={"copying": (4, 8, 16), "induction": (16, 32, 64)},
        test={"copying": (4, 8, 16, 24, 32, 64), "induction": (64, 128, 256, 1024, 4096)},
        examples=10_000, epochs=1, dim=64, batch_size=32, learning_rate=5e-3, tests=64,
    ),
    full=Settings(
        ("softmax", "softmax:window=64", "gla", "mamba", "mamba2", "rwkv7", "deltanet", "gated_deltanet", "lstm"), 3,
        train={"copying": (8, 16, 32, 64), "induction": (16, 32, 64, 128, 256)},
        test={"copying": (16, 32, 64, 96, 128, 256, 512), "induction": tuple(1 << n for n in range(6, 21, 2))},
        examples=40_000, epochs=8, dim=128, batch_size=128, learning_rate=5e-3, tests=128,
    ),
    runs=runs,
    measure=measure,
    rows=rows,
    columns=(
        Column("mixer", "mixer"), Column("task", "task"), Column("state_bytes", "state", memory),
        Column("trained", "at the trained length", share, spread=True), Column("twice", "at twice that", share, spread=True),
        Column("longest", "at the longest", share, spread=True), Column("longest_test", "which is", tokens), Column("seeds", "seeds"),
    ),
    charts=charts,
    notes=(
        "Copying counts whole strings: the share that greedy decoding writes without any error.",
        "Softmax without a window is tested up to 16k tokens, because its cache and its time grow with the length.",
        "The state is measured after the longest trained sequence.",
    ),
)  # fmt: skip
