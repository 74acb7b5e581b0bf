"""Recall from a state of a given number of bytes: MQAR, its forgetting variant, and MAD's tasks (see :mod:`linattn.tasks`).

Models as in Zoology (arXiv 2312.04927 and its code): two layers without feed-forwards, a gated short convolution and then the mixer;
the state grows with the width. Of several learning rates, the one that is best in a short training is used for the whole
training, with every seed: Zoology's grid with early stopping.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch

from linattn import tasks
from linattn.experiment.study import Column, Done, Result, Row, Run, Study, grouped, mean_and_spread, number, share
from linattn.report.charts import Chart
from linattn.report.plot import Heading
from linattn.report.words import memory
from linattn.reproduce import synthetic, variants
from linattn.reproduce.charts import curves, in_bytes, share_of
from linattn.tasks import Examples

CONVOLUTION = "base_conv"  # the layer before the mixer, as in Zoology

Options = dict[str, Any]  # arguments of a generator in linattn.tasks


@dataclass(frozen=True)
class Part:
    """``count`` examples of the function ``generator`` of :mod:`linattn.tasks` with ``options``."""

    generator: str
    options: Options
    count: int

    def make(self, generator: torch.Generator) -> Examples:
        """The examples."""
        return getattr(tasks, self.generator)(self.count, **self.options, generator=generator)


@dataclass(frozen=True)
class Task:
    """A task: its training and test data.

    Args:
        train: training parts, mixed.
        tests: for each line of the table its tests by name; the last is the hardest.
        dims: widths of the models.
        learning_rates: candidates, of which the best is used; with ``rates_of`` another task's best at this width.
        epochs, batch_size: of the training.
        trial: epochs of the short training with each of several learning rates.
        ffn, tie_embeddings: as in LMConfig.
    """

    train: tuple[Part, ...]
    tests: dict[str, dict[str, Part]]
    dims: tuple[int, ...]
    learning_rates: tuple[float, ...]
    epochs: int
    batch_size: int
    trial: int = 0
    rates_of: str | None = None
    ffn: str = "none"
    tie_embeddings: bool = False


@dataclass(frozen=True)
class Settings:
    """``tasks``: keys of :data:`TASKS`."""

    mixers: tuple[str, ...]
    seeds: int
    tasks: tuple[str, ...]


def _mqar(vocab_size: int, *shapes: tuple[int, int, int]) -> tuple[Part, ...]:
    """Parts for (tokens, pairs, count)."""
    return tuple(Part("multi_query_recall", {"tokens": t, "pairs": p, "vocab_size": vocab_size}, n) for t, p, n in shapes)


def _forgetting(vocab_size: int, *shapes: tuple[int, int, int]) -> tuple[Part, ...]:
    """The same with half of the pairs updated."""
    return tuple(Part("forgetting_recall", {"tokens": t, "pairs": p, "updates": p // 2, "vocab_size": vocab_size}, n) for t, p, n in shapes)


def _by_pairs(*parts: Part) -> dict[str, Part]:
    return {f"{part.options['pairs']} pairs": part for part in parts}


def _mad(name: str, generator: str, train: Options, test: Options | None = None) -> Task:
    """A task of MAD at its lowest difficulty."""
    tests = {name: {"test": Part(generator, train if test is None else test, 1280)}}
    return Task((Part(generator, train, 12_800),), tests, (128,), (1e-3, 3e-3), epochs=12, batch_size=128, trial=3, ffn="swiglu")


_GRID = (1e-3, 10**-2.5, 1e-2, 10**-1.5)  # Zoology's grid
TASKS: dict[str, Task] = {
    "quick": Task(
        _mqar(256, (16, 4, 16_000), (32, 8, 8000), (64, 16, 10_000)) + _forgetting(256, (20, 4, 8000), (60, 12, 8000)),
        {
            "mqar": _by_pairs(*_mqar(256, (16, 4, 512), (32, 8, 512), (64, 16, 512))),
            "forgetting": _by_pairs(*_forgetting(256, (20, 4, 512), (60, 12, 512))),
        },
        dims=(32, 64),
        learning_rates=(4e-3,),
        epochs=1,
        batch_size=32,
    ),
    "mqar": Task(
        _mqar(8192, (64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000)),
        {
            "mqar": _by_pairs(
                *_mqar(8192, (64, 4, 1000), (64, 8, 1000), (64, 16, 1000), (128, 32, 1000)),
                *_mqar(8192, (256, 64, 1000), (512, 128, 1000), (1024, 256, 1000)),
            )
        },
        dims=(32, 64, 128, 256),
        learning_rates=_GRID,
        epochs=6,
        batch_size=256,
        trial=2,
        tie_embeddings=True,
    ),
    "forgetting": Task(
        _forgetting(8192, (64, 4, 100_000), (64, 12, 20_000), (128, 24, 20_000), (256, 48, 20_000)),
        {"forgetting": _by_pairs(*_forgetting(8192, (64, 4, 1000), (64, 12, 1000), (128, 24, 1000), (256, 48, 1000)))},
        dims=(64, 128),
        learning_rates=(),
        epochs=6,
        batch_size=256,
        rates_of="mqar",
        tie_embeddings=True,
    ),
    "in-context recall": _mad("in-context recall", "in_context_recall", {"tokens": 128, "vocab_size": 16}),
    "noisy recall": _mad("noisy recall", "in_context_recall", {"tokens": 128, "vocab_size": 32, "noise": 0.2, "noise_vocab": 16}),
    "fuzzy recall": _mad("fuzzy recall", "fuzzy_recall", {"tokens": 128}, {"tokens": 128, "key_sizes": (3,)}),
    "selective copying": _mad("selective copying", "selective_copying", {"tokens": 256}),
    "compression": _mad("compression", "compression", {"tokens": 32}),
    "memorisation": _mad("memorisation", "memorisation", {"tokens": 32}),
}


def runs(settings: Settings, done: Done) -> list[Run]:
    """Runs of the trials of several learning rates, then of the full trainings, seed by seed.

    So an interrupted study covers all mixers before further seeds.
    """
    cells = [(name, dim, mixer) for name in settings.tasks for dim in TASKS[name].dims for mixer in settings.mixers]
    wanted = []
    for name, dim, mixer in cells:
        task = TASKS[name]
        rates = task.learning_rates if task.trial else ()
        wanted += [{**_about(name, dim, mixer), "learning_rate": r, "epochs": task.trial, "trial": True, "seed": 0} for r in rates]
    best = _best(done)
    for seed in range(settings.seeds):
        for name, dim, mixer in cells:
            task = TASKS[name]
            rate = best.get((task.rates_of or name, dim, mixer)) if task.trial or task.rates_of else task.learning_rates[0]
            if rate is not None:
                about = _about(name, dim, mixer)
                wanted.append({**about, "learning_rate": rate, "epochs": task.epochs, "trial": False, "seed": seed})
    return wanted


def _about(name: str, dim: int, mixer: str) -> Run:
    """Run with all settings of its task, which identify it."""
    return {"task": name, "protocol": sha256(repr(TASKS[name]).encode()).hexdigest()[:8], "mixer": mixer, "dim": dim}


def _best(done: Done) -> dict[tuple, float]:
    """Best learning rate for each task, width and mixer with finished trials."""
    best = {}
    for key, group in grouped([one for one in done if one[0]["trial"]], "task", "dim", "mixer").items():
        if len(group) == len(TASKS[key[0]].learning_rates):
            best[key] = max(group, key=lambda one: one[1]["accuracy"])[0]["learning_rate"]
    return best


def measure(run: Run) -> Generator[None, None, Result]:
    """Train one model and test it: accuracy in each test and their mean, bytes of state, parameters, last loss."""
    task = TASKS[run["task"]]
    parts, tests = examples(run["task"], run["seed"], run["device"])
    model = build(task, run["mixer"], run["dim"], parts[0].vocab_size, run["seed"]).to(run["device"])
    recipe = synthetic.Recipe(run["epochs"], task.batch_size, run["learning_rate"], enough=0.005)
    loss = yield from synthetic.train(model, parts, recipe, seed=run["seed"])
    found = {line: {name: synthetic.accuracy(model, test) for name, test in named.items()} for line, named in tests.items()}
    longest = max(test.ids.shape[1] for named in tests.values() for test in named.values())
    return {
        "accuracy": statistics.fmean(value for named in found.values() for value in named.values()),
        "tests": found,
        "state_bytes": synthetic.state_bytes(model, longest),
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": loss,
    }


@lru_cache(maxsize=2)
def examples(name: str, seed: int, device: str) -> tuple[list[Examples], dict[str, dict[str, Examples]]]:
    """Training and test examples, the same for all mixers."""
    task, generator = TASKS[name], torch.Generator().manual_seed(seed)
    parts = [part.make(generator).to(device) for part in task.train]
    return parts, {line: {test: part.make(generator).to(device) for test, part in named.items()} for line, named in task.tests.items()}


def build(task: Task, mixer: str, dim: int, vocab_size: int, seed: int) -> synthetic.Asked:
    """Two layers: the convolution and the mixer."""
    first = task.train[0]
    return synthetic.build(
        mixer, seed, before=CONVOLUTION, tokens=first.options["tokens"] if first.generator == "compression" else None,
        vocab_size=vocab_size, dim=dim, layers=2, ffn=task.ffn, tie_embeddings=task.tie_embeddings,
    )  # fmt: skip


def rows(settings: Settings, done: Done) -> list[Row]:
    """A row for each line of a task, width and mixer, from its full trainings; "curve" holds the accuracy in each test."""
    table = []
    whole = [one for one in done if not one[0]["trial"]]
    for (task, mixer, dim, rate), group in grouped(whole, "task", "mixer", "dim", "learning_rate").items():
        results = [result for _, result in group]
        for line, tests in results[0]["tests"].items():
            of = [result["tests"][line] for result in results]
            row: Row = {"task": line, "mixer": mixer, "dim": dim, "state_bytes": results[0]["state_bytes"], "learning_rate": rate}
            row |= mean_and_spread("accuracy", (statistics.fmean(o.values()) for o in of))
            row |= mean_and_spread("hardest", (list(o.values())[-1] for o in of))
            row["curve"] = {name: mean_and_spread("accuracy", (o[name] for o in of)) for name in tests}
            table.append({**row, "hardest_test": list(tests)[-1], "seeds": len(results), **_paper(task, line, row)})
    lines, dims = [line for name in settings.tasks for line in TASKS[name].tests], sorted({row["dim"] for row in table})
    return sorted(table, key=lambda row: (lines.index(row["task"]), dims.index(row["dim"])))


# Accuracy by thousands of numbers of state, read off the figure in the README of Zoology's repository.
_ZOOLOGY = {
    "deltanet": ((9, 0.79), (34, 0.96), (131, 0.99)),
    "gated_deltanet": ((17, 0.89), (66, 0.99)),
    "gla": ((5, 0.53), (18, 0.77), (68, 0.95)),
    "rwkv7": ((17, 0.82), (131, 0.91)),
    "based": ((9, 0.67), (40, 0.91), (80, 0.98)),
    "mamba2": ((8, 0.52), (33, 0.78), (98, 0.84)),
    "softmax": ((0, 1.0),),
    "window": ((10, 0.08), (131, 0.66), (524, 0.94)),
}
_ZOOLOGY_AT_MOST = {"h3": 0.41}  # at any size
_NEAR = 0.1  # tolerance for reading the figure and for other numbers of epochs


def _paper(task: str, line: str, row: Row) -> Row:
    """Results of Zoology's code for MQAR at its own settings, and whether they hold here if the settings agree."""
    variant = variants.parse(row["mixer"])
    name = "window" if variant.windowed else variant.name
    if line == "mqar" and name in _ZOOLOGY:
        said = ", ".join(f"{accuracy:.2f}" + (f" at {thousand}k" if thousand else "") for thousand, accuracy in _ZOOLOGY[name])
        wanted = _between(_ZOOLOGY[name], row["state_bytes"] / 4e3)
        near = None if wanted is None else abs(row["accuracy"] - wanted) <= _NEAR
    elif line == "mqar" and name in _ZOOLOGY_AT_MOST:
        said = f"at most {_ZOOLOGY_AT_MOST[name]}, even with 2M numbers"
        near = row["accuracy"] <= _ZOOLOGY_AT_MOST[name] + _NEAR
    else:
        return {"paper_says": None, "source": None, "agrees": None}
    source = "Zoology (arXiv 2312.04927), figure of its code, V = 8192, by numbers of state"
    return {"paper_says": said, "source": source, "agrees": near if task == "mqar" else None}


def _between(points: tuple[tuple[int, float], ...], thousand: float) -> float | None:
    """The accuracy at ``thousand`` thousand numbers, interpolated linearly in their logarithm; None outside the points."""
    if len(points) == 1:
        return points[0][1]
    for (a, low), (b, high) in pairwise(points):
        if a <= thousand <= b:
            return low + (high - low) * math.log(thousand / a) / math.log(b / a)
    return None


def charts(_settings: Settings, table: list[Row]) -> list[Chart]:
    """Plots of accuracy over the bytes of state, for each line."""
    drawn, names = [], [row["mixer"] for row in table]
    for task in dict.fromkeys(row["task"] for row in table):
        shown = [row for row in table if row["task"] == task]
        heading = Heading(
            f"bytes-{task.replace(' ', '-')}",
            f"{task}: accuracy by bytes of state",
            "Share of all questions that are answered correctly, over the bytes that the layers keep of the longest test.",
        )
        top = sorted(shown, key=lambda row: -row["accuracy"])[:4]
        best = (f"{variants.parse(row['mixer']).label} {share(row['accuracy'])} ({memory(row['state_bytes'])})" for row in top)
        x, y = in_bytes("state_bytes", "bytes of state"), share_of("accuracy", "accuracy")
        drawn.append(curves(heading, shown, x, y, found=f"Best: {', '.join(best)}.", names=names))
    return [chart for chart in drawn if chart is not None]


_QUICK_MIXERS = ("softmax", "softmax:window=16", "linear_transformer:heads=2", "gla:heads=2", "deltanet", "gated_deltanet")
_FULL_MIXERS = (
    "softmax", "linear_transformer", "retnet", "gla", "mamba2:state_size=32:head_dim=32", "rwkv7", "deltanet", "gated_deltanet", "kda",
    "based:heads=1", "mlstm", "h3", "softmax:window=16", "softmax:window=64",
)  # fmt: skip

STUDY = Study(
    title="What can be recalled from a state",
    question="Models of two layers, a short convolution and a mixer, read pairs of keys and values and are asked for values by their "
    "keys. How many do they answer correctly, and how many bytes do they keep?",
    quick=Settings(_QUICK_MIXERS, 3, ("quick",)),
    full=Settings(_FULL_MIXERS, 3, tuple(name for name in TASKS if name != "quick")),
    runs=runs,
    measure=measure,
    rows=rows,
    columns=(
        Column("mixer", "mixer"), Column("task", "task"), Column("dim", "width"), Column("state_bytes", "state", memory),
        Column("accuracy", "accuracy", share, spread=True), Column("hardest", "in the hardest test", share, spread=True),
        Column("hardest_test", "which is"), Column("learning_rate", "learning rate", number), Column("seeds", "seeds"),
    ),
    charts=charts,
    notes=(
        (
            "The bytes are everything that the two layers keep of the longest test, including the inputs of the convolution and the "
            "positions; softmax keeps every token. For the comparison with the paper four bytes count as one number; a window's cache in "
            "bfloat16 has two numbers in them."
        ),
        (
            "With --quick the vocabulary has 256 tokens, one learning rate is used, and a model sees 50,000 examples of both tasks once. "
            "The result shows how soon the models learn, not what each could learn in the end. gated_deltanet starts with strong decays "
            "and learns last, in some seeds not within these 1,600 steps. "
            "Zoology needs a vocabulary of more than a thousand to separate the models."
        ),
        (
            "With --full the shapes, the vocabulary, the batches and the learning rates are Zoology's. The learning rate that is best "
            "after 2 epochs is trained for 6 with each seed, instead of 32 epochs for every rate; it is chosen on the tests of the first "
            "seed, which favours that seed. A training ends when its loss is below 0.005. The forgetting variant uses the rates found for "
            "recall. The tasks of MAD are those of its baseline, with 12 epochs after 3 with each of two rates. "
            "Six epochs are not enough for every model: on an H200 Mamba-2 of width 256 and GLA of width 128 ended at losses of 1.3 and "
            "1.9 and recalled less than at half the width."
        ),
    ),
)  # fmt: skip
