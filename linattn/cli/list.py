"""``linattn list``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from linattn.mixers.documents import Named
    from linattn.mixers.registry import Info


def list(  # noqa: A001  (a command's function has its name)
    documents: Annotated[
        bool, typer.Option("--documents", help="List the systems named in five introductions to linear attention instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All fields of each, as a JSON array.")] = False,
) -> None:
    """List every registered mixer by family.

    Installed plugins are included. Families follow the survey "Efficient Transformers" (arXiv 2009.06732), with later ones added.

    On a terminal a table for each family; elsewhere one line per mixer with nine tab-separated columns: name, title, year, arXiv
    id, kind of call, recurrent (yes: the state does not grow with the sequence), causal (yes, no), growth of time and memory with
    the n tokens of a sequence, and families. Unknown values are "-".

    With --documents the columns are name ("-" if it is not a mixer), title, introductions, and where it is implemented.
    """
    if documents:
        _list_documents(as_json)
        return
    from linattn.mixers import available, info
    from linattn.mixers.taxonomy import FAMILIES, families

    known = sorted((info(name) for name in available()), key=lambda i: (FAMILIES.index(families(i)[0]), i.name))
    if as_json:
        print(json.dumps([described(i) for i in known], indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        _table(known)
    else:
        print("\n".join("\t".join((*_cells(i), ", ".join(families(i)))) for i in known))


def described(info: Info) -> dict:
    """Convert the facts of ``info`` that concern a user to JSON values."""
    from linattn.mixers.taxonomy import families

    return {k: v for k, v in asdict(info).items() if k not in ("cls", "chinese", "seeds")} | {"families": [*families(info)]}


def _cells(i: Info) -> tuple[str, ...]:
    yes = {True: "yes", False: "no"}
    return i.name, i.title, str(i.year or "-"), i.arxiv or "-", i.kind, yes[i.recurrent], yes[i.causal], i.growth


def _table(known: Sequence[Info]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from linattn.mixers.taxonomy import families

    table = Table("name", "title", "year", "arXiv", "grows as", "state", box=None, header_style="bold", pad_edge=False)
    for family, members in groupby(known, key=lambda i: families(i)[0]):
        table.add_row("", Text(family, style="bold"))
        for i in members:
            table.add_row(i.name, i.title, str(i.year or "-"), i.arxiv or "-", i.growth, _state(i))
    Console().print(table)


def _state(i: Info) -> str:
    """Growth of the state with the tokens; in brackets the kind of a mixer without a state."""
    if i.kind != "sequence":
        return f"({i.kind})"
    if not i.causal:
        return "(both ways)"
    return "constant" if i.recurrent else "n"


def _list_documents(as_json: bool) -> None:
    from linattn.mixers.documents import DOCUMENTS, named

    systems = named()
    titles = {s.title: [DOCUMENTS[d] for d in s.documents] for s in systems}
    if as_json:
        print(json.dumps([asdict(s) | {"documents": titles[s.title]} for s in systems], indent=1, ensure_ascii=False))
    elif sys.stdout.isatty():
        _documents_table(systems)
    else:
        print("\n".join("\t".join((s.name or "-", s.title, "; ".join(titles[s.title]), s.where)) for s in systems))


def _documents_table(systems: Sequence[Named]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from linattn.mixers.documents import DOCUMENTS

    marks = dict(zip("ABCDE", DOCUMENTS, strict=True))
    table = Table("name", "title", *marks, box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    for s in systems:
        title = s.title if s.name else f"{s.title}: {s.where}"
        table.add_row(Text(s.name or "-"), Text(title), *("x" if d in s.documents else "" for d in marks.values()))
    console = Console()
    console.print(table)
    console.print()
    for mark, document in marks.items():
        console.print(f"{mark}  {DOCUMENTS[document]}", style="dim", highlight=False)
