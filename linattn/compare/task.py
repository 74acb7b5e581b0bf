"""Comparison on a task: for every mixer models of equal size, one for each seed, with equal training and evaluation."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from linattn import mixers
from linattn.compare.task_page import charts, page
from linattn.compare.tasks import ALL, Recipe, Savable, Task, TaskOptions, load, on_data
from linattn.experiment import runner
from linattn.experiment.sizing import Size, equal_sizes, parameters
from linattn.experiment.study import Done, Result, Row, Run, Study, grouped, mean_and_spread
from linattn.experiment.trainer import Optimization, Trainer, warmup_times_cosine
from linattn.experiment.workers import Failed, Finished
from linattn.models.memory import TRAINED, require, stack_parameters
from linattn.report.folder import SCHEMA, VERSION, Folder, write_text
from linattn.report.machine import machine

EVALUATIONS = 10  # evaluations during the training of each model


def compare(options: TaskOptions, *, progress: bool = False) -> dict:
    """Train models of every mixer on a task, measure them, write ``report.json``, ``report.html`` and the models into ``options.out``.

    Args:
        options: what to compare.
        progress: show progress on stderr.

    Returns:
        The content of ``report.json``.

    Raises:
        ValueError: a mixer or size that cannot be compared, a training that diverged, or a folder with other files or to which
            another process is writing.
        ModuleNotFoundError: the package with the task's data is not installed.
    """
    task, folder = on_data(options.task, load(options.task), options.data), Folder(options.out)
    recipe = _recipe(task, options)
    for name in recipe.mixers:
        count = stack_parameters(partial(_stack, task, recipe, name), recipe.layers)
        require(TRAINED * count, f"{count:,} parameters (dim {recipe.dim:,}, layers {recipe.layers:,})")
    record = Comparison(folder, Trials(task, recipe, _sizes(task, recipe), options))
    with folder.held(), _own_generator():
        folder.begin(record.report)
        runner.run(record, "training", progress=progress)
        record.close()
    return record.report


@dataclass(frozen=True)
class Trials:
    """A model for every mixer and seed, as a study."""

    task: Task
    recipe: Recipe
    sizes: dict[str, Size]
    options: TaskOptions

    def study(self) -> Study:
        """The study: one run at a time, because times are measured; an error ends it."""
        task = self.task
        return Study(
            title=task.title, question=task.question, quick=task.quick, full=task.full, runs=self.runs, measure=self.measure,
            rows=self.rows, columns=task.figures, charts=lambda _, rows: charts(rows, task), alone=True, strict=True,
        )  # fmt: skip

    def runs(self, recipe: Recipe, _done: Done) -> list[Run]:
        """Runs for every mixer and seed."""
        first = self.options.seed
        return [{"mixer": name, "seed": seed} for name in self.sizes for seed in range(first, first + recipe.seeds)]

    def measure(self, run: Run) -> Result:
        """Train and save a model; return its history, the seconds of its training and its figures."""
        name, seed = run["mixer"], run["seed"]
        torch.manual_seed(seed)
        model = self.task.model(name, self.recipe, self.sizes[name].ffn_dim)
        history = list(learn(self.task, self.recipe, model, seed))
        last = history[-1]
        if not math.isfinite(last["loss"]):
            raise ValueError(f"the training of {name} with seed {seed} diverged: its loss is {last['loss']}; compare without it")
        judged = {f.key: last[f.key] for f in self.task.figures if f.key in last}
        with torch.inference_mode():
            figures = judged | self.task.measure(model.eval())
        place = f"models/{name}/seed-{seed}"
        cast(Savable, model).save(self.options.out / place)
        return {"seed": seed, "seconds": last["seconds"], "figures": figures, "history": history, "model": place}

    def rows(self, _recipe: Recipe, done: Done) -> list[Row]:
        """A row for each mixer: its description, its runs, and the mean and spread over the seeds of every figure."""
        table = []
        for (name,), group in grouped(done, "mixer").items():
            known, runs = mixers.info(name), [result for _, result in group]
            row = {"name": name, "title": known.title, "arxiv": known.arxiv, **asdict(self.sizes[name]), "runs": runs}
            for figure in self.task.figures:
                row |= mean_and_spread(figure.key, [one["figures"][figure.key] for one in runs])
            table.append(row)
        return table


class Comparison(runner.Record):
    """The record of a comparison on a task."""

    def __init__(self, folder: Folder, trials: Trials) -> None:
        super().__init__(folder, trials.study(), trials.recipe)
        self.task, options, recipe = trials.task, trials.options, trials.recipe
        self.report = {
            "schema": SCHEMA,
            "version": VERSION,
            "complete": False,
            "task": options.task,
            "title": self.task.title,
            "question": self.task.question,
            "command": options.command(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "options": {
                **asdict(recipe), "mixers": list(recipe.mixers), "seed": options.seed, "out": str(options.out), "quick": options.quick,
            },
            "data": self.task.facts(),
            "figures": [{"key": f.key, "heading": f.heading} for f in self.task.figures],
            "mixers": [],
        }  # fmt: skip

    def fill(self) -> None:
        self.report["mixers"] = self.study.rows(self.settings, self.results())

    def said(self, one: Finished | Failed) -> str:
        assert isinstance(one, Finished)
        first = self.task.figures[0]
        told = f"{first.heading} {first.write(one.result['figures'][first.key])} after {one.result['seconds']:.0f} s"
        return f"{one.run['mixer']}, seed {one.run['seed']}: {told}"

    def close(self) -> None:
        """Write the page and mark the report as complete."""
        self.report["complete"] = True
        write_text(self.folder.html, page(self.report, self.task))
        self.save()


def _stack(task: Task, recipe: Recipe, name: str, layers: int) -> nn.Module:
    return task.model(name, replace(recipe, layers=layers), None)


def _recipe(task: Task, options: TaskOptions) -> Recipe:
    given = {name: value for name in ("mixers", "steps", "dim", "layers", "seeds") if (value := getattr(options, name)) is not None}
    recipe = replace(task.quick if options.quick else task.full, **given)
    if recipe.mixers != ALL:
        return recipe
    one = replace(recipe, layers=1)
    sizes = {
        name: _parameters(task, one, name, 1) for name in task.mixers()
    }  # the largest comes first, since it determines the sizes of the others
    return replace(recipe, mixers=tuple(sorted(sizes, key=lambda name: (-sizes[name], name))))


def _sizes(task: Task, recipe: Recipe) -> dict[str, Size]:
    """Feed-forward widths for equal parameters."""
    count = partial(_parameters, task, recipe)
    return equal_sizes(recipe.mixers, count(recipe.mixers[0], None), count)


def _parameters(task: Task, recipe: Recipe, mixer: str, ffn_dim: int | None) -> int:
    return parameters(lambda: task.model(mixer, recipe, ffn_dim))


def learn(task: Task, recipe: Recipe, model: nn.Module, seed: int) -> Iterator[dict[str, Any]]:
    """Train ``model``; yield after every tenth of the steps the step, the mean loss since the last, seconds of training, figures."""
    how = Optimization(recipe.steps, recipe.learning_rate, recipe.weight_decay, warmup_times_cosine, fused=False)
    trainer = Trainer(model, lambda batch: task.loss(model.train(), batch), how)
    every = -(-recipe.steps // EVALUATIONS)
    seconds, losses = 0.0, []
    begin = time.perf_counter()
    for step, batch in zip(range(1, recipe.steps + 1), task.batches(recipe, seed), strict=False):
        losses.append(trainer.step(batch).item())
        if step % every == 0 or step == recipe.steps:
            seconds += time.perf_counter() - begin
            with torch.inference_mode():
                yield {"step": step, "loss": statistics.fmean(losses), "seconds": seconds, **task.evaluate(model.eval())}
            losses, begin = [], time.perf_counter()


@contextmanager
def _own_generator() -> Iterator[None]:
    """Context that restores the caller's random generator."""
    with torch.random.fork_rng(devices=[]):
        yield
