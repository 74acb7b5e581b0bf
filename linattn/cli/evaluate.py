"""``linattn evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.cli.options import options_of, takes
from linattn.evaluation.options import EvaluateOptions


@takes(*options_of(EvaluateOptions))
def evaluate(
    given: dict[str, Any],
    models: Annotated[list[Path], typer.Argument(help="Runs, model folders and GGUF files.", show_default=False)],
) -> None:
    """Measure language models side by side.

    Bits per byte of held-out text, distance of next-token distributions from a teacher's, retrieval over long prompts, and at
    each length the bytes of state and the decoding speed. Prints a table; with --out it also writes
    DIR/report.json and DIR/report.html, a page with plots.
    """
    options = EvaluateOptions(**given)
    from linattn.cli.table import show_cells
    from linattn.evaluation.page import rows
    from linattn.evaluation.run import evaluate as run
    from linattn.report.language import both

    report = run(models, options, progress=True)
    heads, lines = rows(report)
    show_cells([both(head).en for head in heads], [[both(cell).en for cell in line] for line in lines])
    if options.out is not None:
        print(f"report: {options.out / 'report.html'}")
