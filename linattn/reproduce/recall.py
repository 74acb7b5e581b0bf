"""What can be recalled from a state of so many bytes: MQAR, its forgetting variant, and MAD's tasks (see :mod:`linattn.tasks`).

Models as in Zoology (arXiv 2312.04927 and its code): two layers without feed-forwards, a gated short convolution and then the mixer;
the state grows with the width. The best of the learning rates counts, each tried with the first seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch

from linattn import tasks
from linattn.report.charts import Chart
from linattn.report.plot import Heading
from linattn.report.words import memory
from linattn.reproduce import fit, variants
from linattn.reproduce.charts import curves, in_bytes, share_of
from linattn.reproduce.study import Column, Done, Result, Row, Run, Study, grouped, mean_and_spread, number, share
from linattn.tasks import Examples

CONVOLUTION = "base_conv"  # the layer in front of the mixer's, as in Zoology

Options = dict[str, Any]  # of a generator in linattn.tasks


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
    """What is learned, and what is asked then.

    Args:
        train: what it is trained on, all mixed.
        tests: for each line of the table its tests by name; the last is the hardest.
        dims: widths of the models.
        learning_rates: of which the best counts.
        epochs, batch_size: of the training.
        ffn, tie_embeddings: as in LMConfig.
    """

    train: tuple[Part, ...]
    tests: dict[str, dict[str, Part]]
    dims: tuple[int, ...]
    learning_rates: tuple[float, ...]
    epochs: int
    batch_size: int
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
    """The same where half of the pairs change."""
    return tuple(Part("forgetting_recall", {"tokens": t, "pairs": p, "updates": p // 2, "vocab_size": vocab_size}, n) for t, p, n in shapes)


def _by_pairs(*parts: Part) -> dict[str, Part]:
    return {f"{part.options['pairs']} pairs": part for part in parts}


def _mad(name: str, generator: str, train: Options, test: Options | None = None) -> Task:
    """A task of MAD at its least difficult."""
    tests = {name: {"test": Part(generator, train if test is None else test, 1280)}}
    return Task((Part(generator, train, 12_800),), tests, (128,), (5e-4, 1e-3, 3e-3), epochs=40, batch_size=128, ffn="swiglu")


_GRID = (1e-3, 10**-2.5, 1e-2, 10**-1.5)  # Zoology's
TASKS: dict[str, Task] = {
    "quick": Task(
        _mqar(256, (32, 4, 8000), (32, 8, 8000), (64, 16, 20_000)) + _forgetting(256, (32, 4, 8000), (64, 12, 20_000)),
        {
            "mqar": _by_pairs(*_mqar(256, (32, 4, 512), (32, 8, 512), (64, 16, 512))),
            "forgetting": _by_pairs(*_forgetting(256, (32, 4, 512), (64, 12, 512))),
        },
        dims=(32, 64),
        learning_rates=(5e-3,),
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
        epochs=8,
        batch_size=256,
        tie_embeddings=True,
    ),
    "forgetting": Task(
        _forgetting(8192, (64, 4, 100_000), (64, 12, 20_000), (128, 24, 20_000), (256, 48, 20_000)),
        {"forgetting": _by_pairs(*_forgetting(8192, (64, 4, 1000), (64, 12, 1000), (128, 24, 1000), (256, 48, 1000)))},
        dims=(64, 128),
        learning_rates=_GRID,
        epochs=8,
        batch_size=256,
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
    """Every learning rate with the first seed, then the other seeds at the best one."""
    best = {key: run["learning_rate"] for key, (run, _) in _best(done).items()}
    wanted = []
    for name in settings.tasks:
        task = TASKS[name]
        protocol, rates = sha256(repr(task).encode()).hexdigest()[:8], task.learning_rates  # other settings are other runs
        for dim in task.dims:
            for mixer in settings.mixers:
                about = {"task": name, "protocol": protocol, "mixer": mixer, "dim": dim}
                wanted += [{**about, "learning_rate": rate, "seed": 0} for rate in rates]
                rate = rates[0] if len(rates) == 1 else best.get((name, mixer, dim))
                wanted += [{**about, "learning_rate": rate, "seed": seed} for seed in range(1, settings.seeds) if rate is not None]
    return wanted


def _best(done: Done) -> dict[tuple, tuple[Run, Result]]:
    """For each task, mixer and width of which all learning rates are done with the first seed, the run that recalled most."""
    best = {}
    for key, group in grouped(done, "task", "mixer", "dim").items():
        first = [one for one in group if one[0]["seed"] == 0]
        if len(first) == len(TASKS[key[0]].learning_rates):
            best[key] = max(first, key=lambda one: one[1]["accuracy"])
    return best


def measure(run: Run) -> Generator[None, None, Result]:
    """Train one model and test it: accuracy in each test and their mean, bytes of state, parameters, last loss."""
    task = TASKS[run["task"]]
    parts, tests = examples(run["task"], run["seed"], run["device"])
    model = build(task, run["mixer"], run["dim"], parts[0].vocab_size, run["seed"]).to(run["device"])
    recipe = fit.Recipe(task.epochs, task.batch_size, run["learning_rate"], enough=0.005)
    loss = yield from fit.train(model, parts, recipe, seed=run["seed"])
    found = {line: {name: fit.accuracy(model, test) for name, test in named.items()} for line, named in tests.items()}
    longest = max(test.ids.shape[1] for named in tests.values() for test in named.values())
    return {
        "accuracy": statistics.fmean(value for named in found.values() for value in named.values()),
        "tests": found,
        "state_bytes": fit.state_bytes(model, longest),
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": loss,
    }


@lru_cache(maxsize=2)
def examples(name: str, seed: int, device: str) -> tuple[list[Examples], dict[str, dict[str, Examples]]]:
    """What is learned from and what is asked: the same for all mixers."""
    task, generator = TASKS[name], torch.Generator().manual_seed(seed)
    parts = [part.make(generator).to(device) for part in task.train]
    return parts, {line: {test: part.make(generator).to(device) for test, part in named.items()} for line, named in task.tests.items()}


def build(task: Task, mixer: str, dim: int, vocab_size: int, seed: int) -> fit.Asked:
    """Two layers: the convolution and the mixer."""
    first = task.train[0]
    return fit.build(
        mixer, seed, before=CONVOLUTION, tokens=first.options["tokens"] if first.generator == "compression" else None,
        vocab_size=vocab_size, dim=dim, layers=2, ffn=task.ffn, tie_embeddings=task.tie_embeddings,
    )  # fmt: skip


def rows(_settings: Settings, done: Done) -> list[Row]:
    """A row for each line of a task, width and mixer, at its best learning rate; "curve" holds the accuracy in each test."""
    best, table = _best(done), []
    for (task, mixer, dim, rate), group in grouped(done, "task", "mixer", "dim", "learning_rate").items():
        if (task, mixer, dim) not in best or best[task, mixer, dim][0]["learning_rate"] != rate:
            continue
        results = [result for _, result in group]
        for line, tests in results[0]["tests"].items():
            of = [result["tests"][line] for result in results]
            row: Row = {"task": line, "mixer": mixer, "dim": dim, "state_bytes": results[0]["state_bytes"], "learning_rate": rate}
            row |= mean_and_spread("accuracy", (statistics.fmean(o.values()) for o in of))
            row |= mean_and_spread("hardest", (list(o.values())[-1] for o in of))
            row["curve"] = {name: mean_and_spread("accuracy", (o[name] for o in of)) for name in tests}
            table.append({**row, "hardest_test": list(tests)[-1], "seeds": len(results), **_paper(line, mixer)})
    lines = list(dict.fromkeys(row["task"] for row in table))
    return sorted(table, key=lambda row: lines.index(row["task"]))


# Accuracy at so many numbers of state, read off the figure in the README of Zoology's repository.
_ZOOLOGY_FIGURE = {
    "deltanet": "0.79 at 9k, 0.96 at 34k, 0.99 at 131k",
    "gated_deltanet": "0.89 at 17k, 0.99 at 66k",
    "gla": "0.53 at 5k, 0.77 at 18k, 0.95 at 68k",
    "rwkv7": "0.82 at 17k, 0.91 at 131k",
    "based": "0.67 at 9k, 0.91 at 40k, 0.98 at 80k",
    "mamba2": "0.52 at 8k, 0.78 at 33k, 0.84 at 98k",
    "h3": "at most 0.41, even at 2M",
    "softmax": "1.00",
}
_WINDOWS_FIGURE = "0.08 at 10k, 0.66 at 131k, 0.94 at 524k"


def _paper(task: str, mixer: str) -> dict[str, str | None]:
    """What Zoology's code gives for MQAR, at its own settings: numbers of state, not bytes."""
    variant = variants.parse(mixer)
    said = _WINDOWS_FIGURE if "window" in variant.options else _ZOOLOGY_FIGURE.get(variant.name)
    if task != "mqar" or said is None:
        return {"paper_says": None, "source": None}
    return {"paper_says": said, "source": "Zoology (arXiv 2312.04927), figure of its code, V = 8192"}


def charts(_settings: Settings, table: list[Row]) -> list[Chart]:
    """For each line accuracy over the bytes of state."""
    drawn, names = [], [row["mixer"] for row in table]
    for task in dict.fromkeys(row["task"] for row in table):
        shown = [row for row in table if row["task"] == task]
        heading = Heading(
            f"bytes-{task.replace(' ', '-')}",
            f"{task}: recalled from so many bytes",
            "The share of all questions that are answered right over the bytes that the layers keep of the longest test.",
        )
        top = sorted(shown, key=lambda row: -row["accuracy"])[:4]
        best = (f"{variants.parse(row['mixer']).label} {share(row['accuracy'])} with {memory(row['state_bytes'])}" for row in top)
        x, y = in_bytes("state_bytes", "bytes of state"), share_of("accuracy", "accuracy")
        drawn.append(curves(heading, shown, x, y, found=f"Best: {', '.join(best)}.", names=names))
    return [chart for chart in drawn if chart is not None]


_QUICK_MIXERS = ("softmax", "linear_transformer", "gla", "deltanet", "gated_deltanet", "softmax:window=16")
_FULL_MIXERS = (
    "softmax", "linear_transformer", "retnet", "gla", "mamba2:state_size=32:head_dim=32", "rwkv6", "rwkv7", "deltanet", "gated_deltanet",
    "kda", "based:heads=1", "hgrn2", "mlstm", "h3", "softmax:window=16", "softmax:window=64",
)  # fmt: skip

STUDY = Study(
    title="What can be recalled from a state",
    question="Models of two layers, a short convolution and a mixer, read pairs of keys and values and are asked for values by their "
    "keys. How much do they answer right, and how many bytes do they keep?",
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
            "The bytes are all that the two layers keep of the longest test, the convolution's last inputs and the positions included; "
            "softmax keeps every token."
        ),
        (
            "With --quick the vocabulary has 256 tokens, one learning rate is tried, and a model sees 64,000 examples once, of both tasks: "
            "what comes out is how soon they learn it and in which order, not what each could learn in the end (gla has not begun to "
            "after these 2,000 steps, with a learning rate of 1e-2 neither). Zoology warns that it takes a vocabulary of more than a "
            "thousand to tell models apart."
        ),
        (
            "With --full the shapes, the vocabulary, the batches and the learning rates are Zoology's, with 8 epochs in place of 32; a "
            "training ends where its loss is below 0.005. The tasks of MAD are those of its baseline, with 40 epochs."
        ),
    ),
)  # fmt: skip
