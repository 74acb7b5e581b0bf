"""``linattn generate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[Path, typer.Argument(help="A run of linattn train, or one of its checkpoints.", show_default=False)],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.", show_default=False)],
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to write at most.")] = 256,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 takes the likeliest token; above 1 is wilder.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Choose among the K likeliest tokens.", show_default="all")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Choose among the likeliest tokens that hold P of the probability.", show_default="all"),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given again.", show_default="none")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="S", help="The same seed, the same text.", show_default="another each time")] = None,
    load_state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on behind what this file has read.", show_default="from the beginning")
    ] = None,
    save_state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the state after prompt and continuation here.", show_default="nowhere")
    ] = None,
) -> None:
    """Continue a text with a trained model.

    The continuation appears as it is written. Memory stays the same however long the text becomes, where the mixers are recurrent.
    """
    from linattn.cli.status import Status
    from linattn.generate import stream, stream_text
    from linattn.generate.sampling import generator
    from linattn.generate.text import printable
    from linattn.state import State, writable
    from linattn.train import load_run

    if not prompt:
        raise ValueError("--prompt is empty: give the model a text to continue")
    if any(not s for s in stop or ()):
        raise ValueError("--stop is empty: give a text to stop at")
    if save_state is not None:  # not after all is written
        writable(save_state)
    chance = generator(seed)
    model, codec = load_run(run)
    state = None if load_state is None else State.load(load_state, model=model)
    tokens = stream(
        model, codec.encode(prompt), max_new_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        generator=chance, state=state,
    )  # fmt: skip
    show = printable if sys.stdout.isatty() else str
    with Status() as status:
        for piece in stream_text(status.watch(tokens), codec.stream(), stop or ()):
            print(show(piece), end="", flush=True)
        print()
    if save_state is not None:
        tokens.state.save(save_state, model=model)
