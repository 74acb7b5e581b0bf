"""``linattn generate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.cli.options import options_of, takes
from linattn.cli.sampling import Decoding, Device, Prompt, Run, Seed, Stop, Temperature, TopK, TopP, check


@takes(*options_of(Decoding))
def generate(
    given: dict[str, Any],
    run: Run,
    prompt: Prompt,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to write at most.")] = 256,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    stop: Stop = None,
    seed: Seed = None,
    device: Device = "cpu",
    load_state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on behind what this file has read.", show_default="from the beginning")
    ] = None,
    save_state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep the state after prompt and continuation here, --stop's text among it.", show_default="nowhere"
        ),
    ] = None,
) -> None:
    """Continue a text with a trained model.

    The prompt and its continuation appear, this as it is written. Memory stays the same however long the text becomes, where the mixers
    are recurrent.
    """
    from linattn.cli.status import Status
    from linattn.generate import stream, stream_text
    from linattn.generate.sampling import generator
    from linattn.generate.text import printable
    from linattn.state import State, writable
    from linattn.train import load_run

    check(prompt, stop)
    decoding = Decoding(**given)
    if save_state is not None:  # not after all is written
        writable(save_state)
    chance = generator(seed, device)
    model, codec = load_run(run, device=device)
    state = None if load_state is None else State.load(load_state, model=model)
    ids = codec.encode(prompt)
    tokens = stream(
        model, ids, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        generator=chance, state=state, **decoding.load(device),
    )  # fmt: skip
    decoding.read(tokens, len(ids))
    show = printable if sys.stdout.isatty() else str
    with Status() as status:
        print(show(prompt), end="", flush=True)
        for piece in stream_text(status.watch(tokens), codec.stream(), stop or ()):
            print(show(piece), end="", flush=True)
        print()
    if save_state is not None:
        tokens.state.save(save_state, model=model)
