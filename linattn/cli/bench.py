"""``linattn bench``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Suite(StrEnum):
    """What can be measured."""

    ops = "ops"


def bench(
    suite: Annotated[Suite, typer.Argument(help="ops: the recurrence against the pure PyTorch code in use today.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Few and short measurements: does everything run?")] = False,
    peers: Annotated[str, typer.Option(metavar="A,B,...", help="Compare with these peers only. [default: all]", show_default=False)] = "",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures, as JSON, to this file.")] = None,
) -> None:
    """Measure the library's speed on this machine.

    The two sides of each comparison take turns in one process; what is told are medians of their ratios.
    """
    only = [name.strip() for name in peers.split(",") if name.strip()]
    match suite:
        case Suite.ops:
            from linattn.bench.ops import run

            run(quick=quick, out=out, only=only)
