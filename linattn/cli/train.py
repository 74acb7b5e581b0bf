"""``linattn train``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.train.options import TrainOptions

_D = TrainOptions()


def train(
    mixer: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help='Mixer of each layer, repeated to fill them, e.g. "gla*3, softmax".', show_default=_D.mixer),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="FILES", help="UTF-8 text or a quoted pattern; may be given again.", show_default="Python's standard library"),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="A Hugging Face tokenizer.json.", show_default="a token per byte")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Optimizer steps.", show_default=str(_D.steps))] = None,
    dim: Annotated[int | None, typer.Option(metavar="D", help="Model width.", show_default=str(_D.dim))] = None,
    layers: Annotated[int | None, typer.Option(metavar="L", help="Number of blocks.", show_default=str(_D.layers))] = None,
    ffn: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help='Feed-forward of each layer, e.g. "swiglu, switch" or "none".', show_default=_D.ffn),
    ] = None,
    context: Annotated[int | None, typer.Option(metavar="T", help="Tokens of one sequence.", show_default=str(_D.context))] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="B", help="Sequences of a step, on each process.", show_default=str(_D.batch_size))
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(metavar="R", help="At its peak.", show_default=str(_D.learning_rate))] = None,
    save_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between checkpoints.", show_default="at the end")] = None,
    eval_every: Annotated[int | None, typer.Option(metavar="N", help="Steps between validations.", show_default="steps / 10")] = None,
    seed: Annotated[int | None, typer.Option(metavar="S", help="Of weights and order of the data.", show_default=str(_D.seed))] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run's folder.", show_default="runs/MIXER")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in DIR, with its options.")] = False,
) -> None:
    """Train a language model on text.

    A killed training goes on with --resume and ends with the weights, bit for bit, that it would have had. For several
    processes start it with torchrun: torchrun --nproc-per-node 8 -m linattn train ...
    """
    options: dict[str, Any] = {
        "mixer": mixer, "text": None if text is None else tuple(text), "tokenizer": tokenizer, "steps": steps, "dim": dim,
        "layers": layers, "ffn": ffn, "context": context, "batch_size": batch_size, "learning_rate": learning_rate,
        "save_every": save_every, "eval_every": eval_every, "seed": seed, "out": out,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    asked = replace(_D, **given, resume=resume)
    if resume:
        from linattn.train import saved_options

        begun = saved_options(asked.folder)
        if begun is None:
            typer.echo(f"{asked.folder} holds no run yet: starting from the beginning", err=True)
        else:
            asked = replace(begun, **given, resume=True)
    from linattn.train import train

    result = train(asked)
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        typer.echo(
            f"{result.run}: {result.parameters:,} parameters, {result.validation_bits_per_byte:.3f} bits per byte of validation text,"
            f" {result.tokens_per_second:,.0f} tokens/s\nContinue a text with: linattn generate {result.run} --prompt 'import '"
        )
