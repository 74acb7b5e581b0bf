"""``linattn draw``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class What(StrEnum):
    """What can be drawn of a system."""

    cell = "cell"
    mask = "mask"
    state = "state"
    cost = "cost"


class Language(StrEnum):
    """Of the words in a drawing."""

    en = "en"
    zh = "zh"


class Scheme(StrEnum):
    """Of the colours of a drawing."""

    light = "light"
    dark = "dark"


OUT = "The file to write: .svg, or .png or .pdf if rsvg-convert or cairosvg is installed. [default: standard output]"


def draw(
    name: Annotated[str, typer.Argument(help="A mixer's name in `linattn list`.", show_default=False)],
    what: Annotated[
        What,
        typer.Option(help="The cell, the mixing matrix on the atlas's sentence, the state after it, or bytes against length."),
    ] = What.cell,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help=OUT,
            show_default=False,
        ),
    ] = None,
    head: Annotated[int, typer.Option(metavar="H", help="Which head of a matrix or state, from 0.")] = 0,
    language: Annotated[Language, typer.Option(help="Language of the words in the drawing.")] = Language.en,
    scheme: Annotated[Scheme, typer.Option(help="Colours for a light or a dark background; there is none in the file.")] = Scheme.light,
) -> None:
    """Draw one system as an SVG file, or as PNG or PDF.

    For papers and slides; every number in it is computed by the mixer as it is created, without training.
    What a system does not have, such as a matrix of an LSTM, is refused with the reason.
    """
    from linattn.atlas.draw import draw as drawn
    from linattn.atlas.image import check, write

    if out is not None:
        check(out)
    svg = drawn(name, what.value, language=language.value, scheme=scheme.value, head=head)
    if out is None:
        sys.stdout.write(svg)
    else:
        write(out, svg)
