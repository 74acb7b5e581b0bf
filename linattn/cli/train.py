"""``linattn train``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.cli.once import say
from linattn.cli.options import options_of, takes
from linattn.train.options import Terminated, TrainOptions


@takes(*options_of(TrainOptions))
def train(
    given: dict[str, Any],
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML or TOML with these options; the command line overrides it.", show_default=False),
    ] = None,
) -> None:
    """Train a language model on text.

    A killed training continues with --resume and ends with the same weights, bit for bit; Ctrl-C and SIGTERM save a checkpoint. Start
    several processes with torchrun: torchrun --nproc-per-node 8 -m linattn train --fsdp --cp 2 ...
    """
    if config is not None:
        from linattn.train.file import read_options

        given = {**read_options(config), **given}
    asked = replace(TrainOptions(), **given)
    if asked.resume:
        from linattn.train import saved_options

        begun = saved_options(asked.folder)
        if begun is None:
            say(f"{asked.folder} holds no run yet: starting from the beginning")
        else:
            asked = replace(begun, **given)
    from linattn.train import train
    from linattn.train.processes import leave

    try:
        result = train(asked)
    except Terminated:
        leave()
        raise
    leave()
    if os.environ.get("RANK", "0") == "0":  # the first process prints
        typer.echo(
            f"{result.run}: {result.parameters:,} parameters, {result.validation_bits_per_byte:.3f} bits per byte of validation text,"
            f" {result.tokens_per_second:,.0f} tokens/s\nContinue a text with: linattn generate {result.run} --prompt 'import '"
        )
