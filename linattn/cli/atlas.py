"""``linattn atlas``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

Action = StrEnum("Action", ["build", "serve"])
ACTIONS = "build: write the atlas to DIR. serve: show DIR, or a temporary atlas, at http://127.0.0.1."


def atlas(
    action: Annotated[Action, typer.Argument(help=ACTIONS, show_default=False)],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="DIR", help="A new or empty folder, or an earlier atlas, which is replaced.", show_default=False),
    ] = None,
    systems: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Only these systems. [default: all registered ones]", show_default=False)
    ] = None,
    results: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measured results to show. [default: the checkout's, if any]", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="Port of serve; 0 takes a free one.", min=0, max=65535)] = 8000,
) -> None:
    """Build or show the atlas, the illustrated guide.

    A static site in English and Chinese, drawn by the running code: open DIR/index.html from disk, without network or server. All
    systems take a minute or two; --systems gla,softmax takes seconds.
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
            raise ValueError(f"--systems and --results apply to a new atlas, but {folder} is already built: omit them or DIR")
        serve(folder, port)
        return
    with TemporaryDirectory(prefix="linattn-atlas-") as made:
        build(made, names=names, results=results, progress=True)
        serve(Path(made), port)
