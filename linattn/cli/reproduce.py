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
    study: Annotated[Name, typer.Argument(help="The study to run.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Sizes for minutes on two cores; the default.")] = False,
) -> None:
    """Reproduce published studies with any mixer.

    The studies measure the capacity of a fixed-size state, state tracking, and extrapolation beyond the training length. Prints
    a table of the papers' claims beside the measured mean and spread over the seeds, and writes DIR/report.json (all figures,
    the machine, the seeds) and DIR/report.html (a page with plots). An interrupted study continues when the same command is
    run again.
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
    print(f"report: {options.folder / 'report.html'}" + ("" if report["complete"] else " (incomplete; the same command continues)"))
    if report["failures"]:
        raise typer.Exit(1)
