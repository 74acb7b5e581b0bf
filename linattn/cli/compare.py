"""``linattn compare``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import Field, replace
from typing import Annotated, Any

import typer

from linattn.cli.options import options_of, shown, takes
from linattn.compare.options import QUICK, CompareOptions
from linattn.compare.tasks import TASKS, TaskOptions, load

TEXT = "text"
ALL = ("all",)
_TASK = "The task: text, or another one with its own kind of model and its own defaults."


def _both(field: Field) -> str | None:
    """The default of ``field``, and the one with --quick if it differs."""
    full, quick = field.default, getattr(QUICK, field.name)
    default = _written(full) if isinstance(full, tuple) and full else shown(field)
    return default if full == quick else f"{default}; with --quick {_written(quick)}"


def _written(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@takes(
    *options_of(CompareOptions, "mixers", "text", "steps", "dim", "layers", "contexts", "learning_rate", "seed", "seeds", show=_both),
    *options_of(TaskOptions, "data"),
    *options_of(CompareOptions, "quick", "out", show=_both),
)
def compare(given: dict[str, Any], task: Annotated[str, typer.Option(metavar="|".join((TEXT, *TASKS)), help=_TASK)] = TEXT) -> None:
    """Train one small model per mixer and compare them.

    All have the same number of parameters, data, order of data and number of steps; each mixer has its own learning rate. Each
    is then measured: bits per byte of held-out text over the seeds, training speed, prefill time and time per decoded token at
    each context, bytes of the state.

    Tasks other than text have their own models and metrics.

    Writes DIR/report.html (a page with plots, in English and Chinese), DIR/report.json (all figures) and DIR/models/NAME (each
    model, for linattn generate). Prints the table: formatted on a terminal, elsewhere tab-separated with a header, one line for
    each mixer and context.
    """
    if task != TEXT:
        _on_task(task, given)
        return
    if "data" in given:
        raise ValueError("--data cannot be used with --task text, which trains on --text")
    if given.get("mixers") == ALL:
        given["mixers"] = _every_mixer()
    from linattn.cli.table import show
    from linattn.report import compare as run

    options = replace(QUICK if given.get("quick") else CompareOptions(), **given)
    report = run(options, progress=True)
    show(report)
    if sys.stdout.isatty():
        model = shlex.quote(str(options.out / report["mixers"][-1]["model"]))
        print(f"\nto generate text with one of them: linattn generate {model} --prompt 'def '")
    print(f"report: {options.out / 'report.html'}")


def _on_task(name: str, given: dict[str, Any]) -> None:
    """Compare on the task ``name``; options of the text task are refused."""
    task = load(name)
    if wrong := [f"--{option.replace('_', '-')}" for option in ("text", "contexts", "learning_rate") if option in given]:
        raise ValueError(f"{' and '.join(wrong)} cannot be used with --task {name}")
    from linattn.cli.table import show_task
    from linattn.compare.task import compare as run

    options = TaskOptions(name, **given)
    report = run(options, progress=True)
    show_task(report, task)
    for note in report["data"].get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    print(f"report: {options.out / 'report.html'}")


def _every_mixer() -> tuple[str, ...]:
    """List every mixer for language models, the largest first, because it sets the sizes of the others."""
    from linattn import mixers

    def size(name: str) -> int:
        return sum(p.numel() for p in mixers.create(name, dim=64).parameters())

    known = [mixers.info(name) for name in mixers.available()]
    return tuple(sorted((m.name for m in known if m.resumable), key=lambda name: (-size(name), name)))
