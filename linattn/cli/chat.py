"""``linattn chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from linattn.cli.sampling import Device, Run, Temperature, TopK, TopP


def chat(
    run: Run,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of a reply at most.")] = 256,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    stop: Annotated[str, typer.Option(metavar="TEXT", help="What ends a reply.", show_default="the end of a line")] = "\n",
    seed: Annotated[int | None, typer.Option(metavar="S", help="The same seed, the same replies.", show_default="others each time")] = None,
    device: Device = "cpu",
    load_state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on with the conversation in this file.", show_default="a new one")
    ] = None,
    save_state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the conversation here, after every reply.", show_default="nowhere")
    ] = None,
) -> None:
    """Talk with a trained model, a line and a reply in turn.

    What was said is kept in the state alone, whose bytes are shown behind every reply: they stay the same, where the mixers are
    recurrent. The end of the input (Ctrl-D) ends the conversation.
    """
    import torch

    from linattn.cli.model import read
    from linattn.cli.status import Status
    from linattn.generate import prefill, stream, stream_text
    from linattn.generate.sampling import generator
    from linattn.generate.text import printable
    from linattn.state import State, writable

    if not stop:
        raise ValueError("--stop is empty: give a text that ends a reply")
    if save_state is not None:  # not after the first reply
        writable(save_state)
    chance = generator(seed, device)
    model, codec = read(run, device)
    state = None if load_state is None else State.load(load_state, model=model)
    reply = partial(stream, model, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, generator=chance)
    reply([0], state=state)  # reads nothing, and refuses what does not fit before a line is typed
    for line in _lines():
        tokens = reply(codec.encode(f"{line}\n"), state=state)
        said: list[int] = []
        with Status() as status:
            for piece in stream_text(_noted(status.watch(tokens), said), codec.stream(), [stop]):
                print(printable(piece), end="", flush=True)
            print()
        state = tokens.state
        if stop not in codec.decode(said):  # --max-new-tokens has cut it short
            _, state = prefill(model.model, torch.tensor([codec.encode(stop)], device=model.lm_head.weight.device), state)
        if save_state is not None:
            state.save(save_state, model=model)


def _lines() -> Iterator[str]:
    """What is typed, line by line; empty ones say nothing."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _noted(tokens: Iterator[int], said: list[int]) -> Iterator[int]:
    for token in tokens:
        said.append(token)
        yield token
