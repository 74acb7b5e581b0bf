"""``linattn atlas``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer


class Action(StrEnum):
    """What can be done with the atlas."""

    build = "build"
    serve = "serve"


ACTIONS = "build: write it into DIR. serve: show DIR, or one made for the occasion, at http://127.0.0.1."


def atlas(
    action: Annotated[Action, typer.Argument(help=ACTIONS, show_default=False)],
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="A new or an empty folder, or one with an earlier atlas, which is replaced.", show_default=False
        ),
    ] = None,
    systems: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Only these systems. [default: all that are registered]", show_default=False)
    ] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measured results to show. [default: the checkout's, if any]", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="Where serve listens; 0 takes a free port.", min=0, max=65535)] = 8000,
) -> None:
    """Build or show the atlas, the illustrated guide.

    A static site in English and Chinese, drawn by the running code, that opens from disk: DIR/index.html. It needs no network and
    no server. All systems take a minute or two; --systems gla,softmax some seconds.
    """
    from linattn.atlas import build, serve

    names = None if systems is None else [name.strip() for name in systems.split(",") if name.strip()]
    if action is Action.build:
        if folder is None:
            raise ValueError("atlas build needs a folder: linattn atlas build DIR")
        print(build(folder, names=names, results=results, progress=True))
        return
    if folder is not None:
        if systems is not None or results is not None:
            raise ValueError(f"--systems and --results are for a new atlas, and {folder} is shown as it was built: leave them out, or DIR")
        serve(folder, port)
        return
    with TemporaryDirectory(prefix="linattn-atlas-") as made:
        build(made, names=names, results=results, progress=True)
        serve(Path(made), port)
