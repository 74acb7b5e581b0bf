"""``linattn reproduce``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from linattn.cli.options import options_of, takes
from linattn.reproduce.options import STUDIES, ReproduceOptions

Name = StrEnum("Name", {name.replace("-", "_"): name for name in STUDIES})  # type: ignore[misc]  # the names of the studies are data


@takes(*options_of(ReproduceOptions))
def reproduce(
    given: dict[str, Any],
    study: Annotated[Name, typer.Argument(help="What to show.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="What two cores show in minutes; the default.")] = False,
) -> None:
    """Make the papers' evidence again, with any mixer.

    What can a state of fixed size hold, what can it keep track of, how far beyond its training does it go? Prints a table
    with what the papers say beside what came out here, mean and spread over the seeds, and writes DIR/report.json (all
    figures, the machine, the seeds) and DIR/report.html (a page with plots). A study that was cut off goes on where it was
    when the same command is given again.
    """
    if quick and "full" in given:
        raise ValueError("--quick and --full exclude each other")
    if given.get("mixers") == ("all",):
        from linattn.reproduce.variants import everyone

        given["mixers"] = everyone()
    options = ReproduceOptions(study.value, **given)
    from linattn.cli.table import show_rows
    from linattn.reproduce.ledger import load
    from linattn.reproduce.ledger import reproduce as run
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
