"""``linattn reproduce``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from linattn.reproduce.options import STUDIES, ReproduceOptions

Name = StrEnum("Name", {name.replace("-", "_"): name for name in STUDIES})  # type: ignore[misc]  # the names of the studies are data

_MIXERS = "Names from `linattn list`, with options as in softmax:window=16, or all. [default: the study's own choice]"
_SEEDS = "Repeat everything with so many seeds. [default: the study's own, mostly 3]"
_OUT = "Folder of the report; what is in it is not done again. [default: runs/reproduce/STUDY]"


def reproduce(
    study: Annotated[Name, typer.Argument(help="What to show.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="What two cores show in minutes; the default.")] = False,
    full: Annotated[bool, typer.Option("--full", help="The papers' own settings, for a GPU.")] = False,
    mixers: Annotated[str | None, typer.Option(metavar="A,B,...", help=_MIXERS, show_default=False)] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help=_SEEDS, show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=_OUT, show_default=False)] = None,
    minutes: Annotated[
        float | None, typer.Option(metavar="M", help="Begin nothing new after so long; the same command goes on.", show_default=False)
    ] = None,
) -> None:
    """Make the papers' evidence again, with any mixer.

    What can a state of fixed size hold, what can it keep track of, how far beyond its training does it go? Prints a table
    with what the papers say beside what came out here, mean and spread over the seeds, and writes DIR/report.json (all
    figures, the machine, the seeds) and DIR/report.html (a page with plots). A study that was cut off goes on where it was
    when the same command is given again.
    """
    if quick and full:
        raise ValueError("--quick and --full exclude each other")
    options = ReproduceOptions(study.value, full, None if mixers is None else _names(mixers), seeds, out, minutes)
    from linattn.cli.table import show_rows
    from linattn.reproduce.frame import load
    from linattn.reproduce.frame import reproduce as run
    from linattn.reproduce.page import left_out

    report = run(options, progress=True)
    show_rows(load(options.study).all_columns, report["rows"])
    for said in left_out(report):
        print(f"left out: {said}")
    for failure in report["failures"]:
        print(f"failed: {failure['run']}: {failure['error']}")
    print(f"report: {options.folder / 'report.html'}" + ("" if report["complete"] else " (not complete; the same command goes on)"))
    if report["failures"]:
        raise typer.Exit(1)


def _names(text: str) -> tuple[str, ...]:
    """The names in ``text``; "all" is every mixer that a language model can have."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if names != ("all",):
        return names
    from linattn.reproduce.variants import everyone

    return everyone()
