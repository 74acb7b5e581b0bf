"""``linattn draw``."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Figure(StrEnum):
    """Figures of a system."""

    cell = "cell"
    mask = "mask"
    state = "state"
    cost = "cost"


class Language(StrEnum):
    """Language of the words in a figure."""

    en = "en"
    zh = "zh"


class Scheme(StrEnum):
    """Colour scheme of a figure."""

    light = "light"
    dark = "dark"


OUT = "The file to write: .svg, or .png or .pdf if rsvg-convert or cairosvg is installed. [default: standard output]"


def draw(
    name: Annotated[str, typer.Argument(help="A mixer's name in `linattn list`.", show_default=False)],
    what: Annotated[
        Figure,
        typer.Option(help="The cell, the mixing matrix on the atlas's sentence, the state after it, or bytes against length."),
    ] = Figure.cell,
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
    head: Annotated[int, typer.Option(metavar="H", help="Head of a matrix or state, from 0.")] = 0,
    language: Annotated[Language, typer.Option(help="Language of the words in the drawing.")] = Language.en,
    scheme: Annotated[Scheme, typer.Option(help="Colours for a light or a dark background; the file has none.")] = Scheme.light,
) -> None:
    """Draw one system as an SVG file, or as PNG or PDF.

    For papers and slides; an untrained mixer computes every number in it. A figure that a system cannot have,
    such as the mixing matrix of an LSTM, is refused with the reason.
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
