"""``linattn generate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.cli.options import options_of, takes
from linattn.cli.sampling import Decoding, Prompt, Run, Stop, check


@takes(*options_of(Decoding))
def generate(
    given: dict[str, Any],
    run: Run,
    prompt: Prompt,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of new tokens.")] = 256,
    stop: Stop = None,
    load_state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Continue from the state in this file.", show_default=False),
    ] = None,
    save_state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the state after prompt and continuation here, --stop's text included.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Continue a text with a trained model.

    Prints the prompt, then each new token as soon as it is chosen. With recurrent mixers the memory does not grow with the text.
    """
    from linattn.cli.status import Status
    from linattn.generate import stream, stream_text
    from linattn.generate.sampling import generator
    from linattn.generate.text import printable
    from linattn.state import State, writable
    from linattn.train import load_run

    check(prompt, stop)
    decoding = Decoding(**given)
    if save_state is not None:  # fail now, not after the last token
        writable(save_state)
    random = generator(decoding.seed, decoding.device)
    model, codec = load_run(run, device=decoding.device)
    state = None if load_state is None else State.load(load_state, model=model)
    ids = codec.encode(prompt)
    tokens = stream(model, ids, max_new_tokens=max_new_tokens, state=state, **decoding.keywords(random))
    decoding.read(tokens, len(ids))
    show = printable if sys.stdout.isatty() else str
    with Status() as status:
        print(show(prompt), end="", flush=True)
        for piece in stream_text(status.watch(tokens), codec.stream(), stop or ()):
            print(show(piece), end="", flush=True)
        print()
    if save_state is not None:
        tokens.state.save(save_state, model=model)
