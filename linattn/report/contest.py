"""A comparison on a task: for every mixer equally large models, one for each seed, trained and judged alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from linattn import mixers
from linattn.models.memory import TRAINED, require, stack_parameters
from linattn.report.contest_page import page
from linattn.report.folder import SCHEMA, VERSION, Folder, write_text
from linattn.report.machine import machine
from linattn.report.progress import Progress
from linattn.report.sizing import Size, equal_sizes
from linattn.report.tasks import ALL, Recipe, Savable, Task, TaskOptions, load, on_data

EVALUATIONS = 10  # of each model while it learns


def compete(options: TaskOptions, *, progress: bool = False) -> dict:
    """Train models of every mixer on a task, measure them, write ``report.json``, ``report.html`` and the models into ``options.out``.

    Args:
        options: what to compare.
        progress: show on stderr how far it is.

    Returns:
        What ``report.json`` holds.

    Raises:
        ValueError: a mixer or size that cannot be compared, a training that diverged, or a folder that holds something else or to which
            another process is writing.
        ModuleNotFoundError: what the task's data come with is not installed.
    """
    task, folder = on_data(options.task, load(options.task), options.data), Folder(options.out)
    recipe = _recipe(task, options)
    for name in recipe.mixers:
        parameters = stack_parameters(partial(_stack, task, recipe, name), recipe.layers)
        require(TRAINED * parameters, f"{parameters:,} parameters (dim {recipe.dim:,}, layers {recipe.layers:,})")
    sizes = _sizes(task, recipe)
    report = _head(task, options, recipe)
    bar = Progress(progress)
    with folder.held(), bar.counted("training", len(sizes) * recipe.seeds) as advance, _own_generator():
        folder.begin(report)
        for name, size in sizes.items():
            row = _row(name, size)
            report["mixers"].append(row)
            for seed in range(options.seed, options.seed + recipe.seeds):
                model, run = _trained(task, recipe, name, size, seed)
                cast(Savable, model).save(folder.models / name / f"seed-{seed}")
                row["runs"].append({**run, "model": f"models/{name}/seed-{seed}"})
                advance(f"{name}, seed {seed}: {_said(task, run)}")
            row |= _summary(task, row["runs"])
            folder.save(report)
        report["complete"] = True
        write_text(folder.html, page(report, task))
        folder.save(report)
    return report


def _stack(task: Task, recipe: Recipe, name: str, layers: int) -> nn.Module:
    return task.model(name, replace(recipe, layers=layers), None)


def _recipe(task: Task, options: TaskOptions) -> Recipe:
    given = {name: value for name in ("mixers", "steps", "dim", "layers", "seeds") if (value := getattr(options, name)) is not None}
    recipe = replace(task.quick if options.quick else task.full, **given)
    if recipe.mixers != ALL:
        return recipe
    one = replace(recipe, layers=1)
    sizes = {name: _parameters(task, one, name, 1) for name in task.mixers()}  # the largest first: it sets the sizes of the rest
    return replace(recipe, mixers=tuple(sorted(sizes, key=lambda name: (-sizes[name], name))))


def _sizes(task: Task, recipe: Recipe) -> dict[str, Size]:
    """Feed-forward widths for equal parameters."""
    count = partial(_parameters, task, recipe)
    return equal_sizes(recipe.mixers, count(recipe.mixers[0], None), count)


def _parameters(task: Task, recipe: Recipe, mixer: str, ffn_dim: int | None) -> int:
    """How many a model has, which is built without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in task.model(mixer, recipe, ffn_dim).parameters())


def _head(task: Task, options: TaskOptions, recipe: Recipe) -> dict[str, Any]:
    """The report before anything is measured."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "complete": False,
        "task": options.task,
        "title": task.title,
        "question": task.question,
        "command": options.command(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "options": {**asdict(recipe), "mixers": list(recipe.mixers), "seed": options.seed, "out": str(options.out), "quick": options.quick},
        "data": task.facts(),
        "figures": [{"key": f.key, "heading": f.heading} for f in task.figures],
        "mixers": [],
    }


def _row(name: str, size: Size) -> dict[str, Any]:
    known = mixers.info(name)
    return {"name": name, "title": known.title, "arxiv": known.arxiv, "ffn_dim": size.ffn_dim, "parameters": size.parameters, "runs": []}


def _summary(task: Task, runs: list[dict]) -> dict[str, float | None]:
    """Of every figure the mean over the seeds and the sample standard deviation, None for one seed."""
    told: dict[str, float | None] = {}
    for figure in task.figures:
        values = [run["figures"][figure.key] for run in runs]
        told[figure.key] = statistics.fmean(values)
        told[f"{figure.key}_spread"] = statistics.stdev(values) if len(values) > 1 else None
    return told


def _said(task: Task, run: dict) -> str:
    first = task.figures[0]
    return f"{first.heading} {first.write(run['figures'][first.key])} after {run['seconds']:.0f} s"


def _trained(task: Task, recipe: Recipe, name: str, size: Size, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A model, and how it came about: its history, the seconds of its training and its figures."""
    torch.manual_seed(seed)
    model = task.model(name, recipe, size.ffn_dim)
    history = list(learn(task, recipe, model, seed))
    last = history[-1]
    if not math.isfinite(last["loss"]):
        raise ValueError(f"the training of {name} with seed {seed} diverged: its loss is {last['loss']}; compare without it")
    judged = {f.key: last[f.key] for f in task.figures if f.key in last}
    with torch.inference_mode():
        figures = judged | task.measure(model.eval())
    return model, {"seed": seed, "seconds": last["seconds"], "figures": figures, "history": history}


def learn(task: Task, recipe: Recipe, model: nn.Module, seed: int) -> Iterator[dict[str, Any]]:
    """Train ``model``; after every tenth of the steps the step, the mean loss since the last time, seconds of training, figures."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe.steps))
    every = -(-recipe.steps // EVALUATIONS)
    seconds, losses = 0.0, []
    begin = time.perf_counter()
    for step, batch in zip(range(1, recipe.steps + 1), task.batches(recipe, seed), strict=False):
        loss = task.loss(model.train(), batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % every == 0 or step == recipe.steps:
            seconds += time.perf_counter() - begin
            with torch.inference_mode():
                yield {"step": step, "loss": statistics.fmean(losses), "seconds": seconds, **task.evaluate(model.eval())}
            losses, begin = [], time.perf_counter()


def _rate(step: int, steps: int) -> float:
    """Of the peak: up over the first twentieth of the steps, then half a cosine down to 0."""
    warmup = max(1, steps // 20)
    return min((step + 1) / warmup, 1.0) * 0.5 * (1 + math.cos(math.pi * step / steps))


@contextmanager
def _own_generator() -> Iterator[None]:
    """Leave the caller's random generator as it was."""
    with torch.random.fork_rng(devices=[]):
        yield
