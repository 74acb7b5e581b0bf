"""An instant study for the runner's tests; worker processes import it by name."""

import os
from dataclasses import dataclass

from linattn.experiment import workers
from linattn.experiment.study import Column, LeftOut, Study, grouped, mean_and_spread, share
from linattn.report.plot import Heading
from linattn.reproduce.charts import curves, in_tokens, share_of


@dataclass(frozen=True)
class Settings:
    mixers: tuple[str, ...] = ("gla", "softmax")
    seeds: int = 2
    sizes: tuple[int, ...] = (4, 8)


def runs(settings, done):
    wanted = [
        {"mixer": m, "size": size, "seed": seed, "again": False}
        for m in settings.mixers
        for size in settings.sizes
        for seed in range(settings.seeds)
    ]
    if len(done) >= len(wanted):  # one result leads to the next run
        wanted.append({"mixer": settings.mixers[0], "size": 16, "seed": 0, "again": True})
    return wanted


def measure(run):
    """A generator, like trainings."""
    for _ in range(3):
        yield
    if run["mixer"] == "lstm":
        raise LeftOut("it is too <long>")
    if run["mixer"] == "rwkv7":
        workers.device_lost = lambda: True
        raise RuntimeError("an illegal memory access")
    if run["mixer"] == "gru":
        raise ZeroDivisionError("a bug")
    return {"score": (run["size"] + run["seed"]) / 32, "process": os.getpid(), "loss": float("nan")}


def rows(settings, done):
    return [
        {
            "mixer": m,
            "size": size,
            **mean_and_spread("score", (r["score"] for _, r in group)),
            "paper_says": "0.5",
            "source": "a <paper>",
            "agrees": True,
        }
        for (m, size), group in grouped(done, "mixer", "size").items()
    ]


def charts(settings, table):
    chart = curves(
        Heading("score", "Score", "What came out."), table, in_tokens("size", "size"), share_of("score", "score"), found="Found."
    )
    return [] if chart is None else [chart]


def study(**changes):
    options = {
        "title": "A toy", "question": "Is 1 < 2?",
        "quick": Settings(), "full": Settings(sizes=(4, 8, 12)), "runs": runs, "measure": measure,
        "rows": rows, "columns": (Column("mixer", "mixer"), Column("size", "size"), Column("score", "score", share, spread=True)),
        "charts": charts, "notes": ("A <note>.",), "alone": True,
    }  # fmt: skip
    return Study(**{**options, **changes})
