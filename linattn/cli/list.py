"""``linattn list``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from linattn.mixers.registry import Info


def list(  # noqa: A001  (a door's function has its name)
    as_json: Annotated[bool, typer.Option("--json", help="All that is known of each, as a JSON array.")] = False,
) -> None:
    """List every registered mixer, installed plugins' too.

    On a terminal a table; elsewhere one line each with seven tab-separated columns: name, title, year, arXiv id, kind,
    recurrent (yes: the state does not grow with the sequence), causal (yes, no). What is not known is "-".
    """
    from linattn.mixers import available, info

    known = [info(name) for name in available()]
    if as_json:
        print(json.dumps([described(i) for i in known], indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        _table(known)
    else:
        print("\n".join("\t".join(_cells(i)) for i in known))


def described(info: Info) -> dict:
    """``info`` as JSON values."""
    return {k: v for k, v in asdict(info).items() if k != "cls"}


def _cells(i: Info) -> tuple[str, ...]:
    yes = {True: "yes", False: "no"}
    return i.name, i.title, str(i.year or "-"), i.arxiv or "-", i.kind, yes[i.recurrent], yes[i.causal]


def _table(known: Sequence[Info]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "title", "year", "arXiv", "kind", "recurrent", "causal", box=None, header_style="bold", pad_edge=False)
    for i in known:
        table.add_row(*_cells(i))
    Console().print(table)
