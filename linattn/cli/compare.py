"""``linattn compare``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.report.options import QUICK, CompareOptions
from linattn.report.tasks import TASKS, TaskOptions, load

_FULL = CompareOptions()
TEXT = "text"


def _option(name: str, metavar: str, text: str) -> Any:
    """A typer option that shows both of its defaults."""
    full, quick = (_written(getattr(o, name)) for o in (_FULL, QUICK))
    default = full if full == quick else f"{full}; with --quick {quick}"
    return typer.Option(metavar=metavar, help=f"{text} [default: {default}]", show_default=False)


def _written(value: object) -> str:
    if value == ():
        return "the source of Python's standard library"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_MIXERS = "Names from `linattn list`, or all. The first has the usual feed-forward; the others' are as wide as equal parameters need."
_TASK = "What is learned: text by language models, or something else by models of its own, with defaults of its own."
_SEEDS = "Models of each mixer, with the seeds S, S + 1, ...; text has one. [default: the task's own, 3]"
_DATA = (
    "A file that the task learns from: recommend takes a CSV with the columns user,item,time, translate lines of a source, a tab and its "
    "target. [default: the task's own data]"
)
_OUT = "Folder of the report: a new or an empty one, or one with an earlier report, which is replaced."


def compare(
    task: Annotated[str, typer.Option(metavar="|".join((TEXT, *TASKS)), help=_TASK)] = TEXT,
    mixers: Annotated[str | None, _option("mixers", "A,B,...", _MIXERS)] = None,
    text: Annotated[list[str] | None, _option("text", "FILE", "UTF-8 text to learn from; may be given several times.")] = None,
    steps: Annotated[int | None, _option("steps", "N", "Optimizer steps for each model.")] = None,
    dim: Annotated[int | None, _option("dim", "D", "Width of the models, a multiple of 32.")] = None,
    layers: Annotated[int | None, _option("layers", "L", "Blocks of each model.")] = None,
    contexts: Annotated[str | None, _option("contexts", "N,N,...", "Tokens before which prefill, decode and state are measured.")] = None,
    seed: Annotated[int | None, _option("seed", "S", "Seed of weights, order of the data and samples.")] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help=_SEEDS, show_default=False)] = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help=_DATA, show_default=False)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small models, few steps: does everything work, in under a minute?")] = False,
    out: Annotated[Path | None, _option("out", "DIR", _OUT)] = None,
) -> None:
    """Train one small model per mixer and compare them.

    All have the same number of parameters, read the same data in the same order and get the same number of steps. Then
    each is measured: bits per byte on text it has not seen, speed of training, time to read a prompt and to write a token
    at each context, bytes kept of the past.

    Another --task than text has models of its own and measures what matters there; several seeds of each are trained.

    Writes DIR/report.html (a page with plots), DIR/report.json (all figures) and DIR/models/NAME (each model, for linattn
    generate). Prints the table: for people on a terminal, elsewhere tab-separated with a line of column names, one line
    for each mixer and context.
    """
    if task != TEXT:
        asked = {"mixers": mixers, "steps": steps, "dim": dim, "layers": layers, "seeds": seeds, "seed": seed, "out": out, "quick": quick}
        asked["data"] = data
        _on_task(task, {k: v for k, v in asked.items() if v is not None}, {"--text": text, "--contexts": contexts})
        return
    if seeds is not None:
        raise ValueError("--seeds means nothing to --task text, which trains one model of each mixer")
    if data is not None:
        raise ValueError("--data means nothing to --task text, which learns from --text")
    from linattn.cli.table import show
    from linattn.report import compare as run

    given: dict[str, Any] = {
        "mixers": None if mixers is None else _names(mixers), "text": tuple(text) if text else None, "steps": steps, "dim": dim,
        "layers": layers, "contexts": None if contexts is None else _numbers(contexts), "seed": seed, "out": out,
    }  # fmt: skip
    options = replace(QUICK if quick else _FULL, **{k: v for k, v in given.items() if v is not None})
    report = run(options, progress=True)
    show(report)
    if sys.stdout.isatty():
        print(f"\nto go on with one: linattn generate {shlex.quote(str(options.out / report['mixers'][-1]['model']))} --prompt 'def '")
    print(f"report: {options.out / 'report.html'}")


def _on_task(name: str, given: dict[str, Any], foreign: dict[str, Any]) -> None:
    """Compare on the task ``name``; options that are ``foreign`` to it are refused."""
    task = load(name)
    if wrong := [option for option, value in foreign.items() if value]:
        raise ValueError(f"{' and '.join(wrong)} mean nothing to --task {name}")
    from linattn.cli.table import show_contest
    from linattn.report.contest import compete

    if "mixers" in given:
        given["mixers"] = _listed(given["mixers"])
    options = TaskOptions(name, **given)
    report = compete(options, progress=True)
    show_contest(report, task)
    for note in report["data"].get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    print(f"report: {options.out / 'report.html'}")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _names(text: str) -> tuple[str, ...]:
    """The names in ``text``; "all" is every mixer that a language model can have, the largest first: it sets the sizes of the rest."""
    names = _listed(text)
    if names != ("all",):
        return names
    from linattn import mixers

    def size(name: str) -> int:
        return sum(p.numel() for p in mixers.create(name, dim=64).parameters())

    known = [mixers.info(name) for name in mixers.available()]
    return tuple(sorted((m.name for m in known if m.resumable), key=lambda name: (-size(name), name)))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",") if number.strip())
    except ValueError:
        raise ValueError(f"--contexts must be whole numbers with commas between them, but came as {text!r}") from None
