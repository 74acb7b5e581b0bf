"""The arguments and options of commands that write with a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[
    Path,
    typer.Argument(help="A run of linattn train, one of its checkpoints, a published model's folder, or a GGUF file.", show_default=False),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="Where the model goes, such as cuda.")]
Prompt = Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.", show_default=False)]
Temperature = Annotated[float, typer.Option(metavar="X", help="0 takes the likeliest token; above 1 is wilder.")]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Choose among the K likeliest tokens.", show_default="all")]
TopP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Choose among the likeliest tokens that hold P of the probability.", show_default="all"),
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given again.", show_default="none")]
Seed = Annotated[int | None, typer.Option(metavar="S", help="The same seed, the same text.", show_default="another each time")]


def check(prompt: str, stop: Sequence[str] | None) -> None:
    """Refuse an empty text."""
    if not prompt:
        raise ValueError("--prompt is empty: give the model a text to continue")
    if any(not s for s in stop or ()):
        raise ValueError("--stop is empty: give a text to stop at")
