"""``linattn chat``."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from linattn.cli.sampling import Device, Run, Temperature, TopK, TopP


def chat(
    run: Run,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of a reply at most.")] = 256,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    stop: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="What ends a reply.", show_default="the model's end token with a chat template, else the end of a line"
        ),
    ] = None,
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

    A chat template beside the model says how turns are put. What was said is kept in the state alone, whose bytes are shown behind every
    reply: they stay the same, where the mixers are recurrent. The end of the input (Ctrl-D) ends the conversation.
    """
    import torch

    from linattn.cli.status import Status
    from linattn.generate import prefill, stream, stream_text
    from linattn.generate.sampling import generator
    from linattn.generate.text import printable
    from linattn.state import State, writable
    from linattn.train import load_run

    if stop == "":
        raise ValueError("--stop is empty: give a text that ends a reply")
    if save_state is not None:  # not after the first reply
        writable(save_state)
    chance = generator(seed, device)
    model, codec = load_run(run, device=device)
    turns = _turns(run, model, stop)
    state = None if load_state is None else State.load(load_state, model=model)
    reply = partial(
        stream, model, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, stop=turns.stops, generator=chance
    )  # fmt: skip
    reply([0], state=state)  # reads nothing, and refuses what does not fit before a line is typed
    texts = [stop or turns.end] if stop or not turns.stops else []
    for line in _lines():
        tokens = reply(codec.encode(turns.first(line) if state is None else turns.later(line)), state=state)
        said: list[int] = []
        with Status() as status:
            for piece in stream_text(_noted(status.watch(tokens), said, turns.stops), codec.stream(), texts):
                print(printable(piece), end="", flush=True)
            print()
        state = tokens.state
        if turns.end not in codec.decode(said):  # --max-new-tokens or --stop has cut it short
            _, state = prefill(model.model, torch.tensor([codec.encode(turns.end)], device=model.lm_head.weight.device), state)
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


class _Turns(Protocol):
    """What is read before each reply, and what ends one: tokens, and a text that is read where the reply was cut short."""

    @property
    def stops(self) -> tuple[int, ...]: ...
    @property
    def end(self) -> str: ...
    def first(self, text: str) -> str: ...
    def later(self, text: str) -> str: ...


@dataclass(frozen=True)
class _Lines:
    """Turns of one line each, without a chat template."""

    end: str
    stops: tuple[int, ...] = ()

    def first(self, text: str) -> str:
        return f"{text}\n"

    later = first


def _turns(run: Path, model: Any, stop: str | None) -> _Turns:
    """Turns of the chat template beside the model, for which transformers is needed; lines if there is none."""
    if not run.is_dir() or any((run / name).is_file() for name in ("tokenizer_config.json", "chat_template.jinja")):
        from linattn.hf.chat import chat_of

        if (chat := chat_of(run, model)) is not None:
            return chat
    return _Lines(stop or "\n")


def _noted(tokens: Iterator[int], said: list[int], ends: Collection[int]) -> Iterator[int]:
    """Pass on the tokens that are text, and note all."""
    for token in tokens:
        said.append(token)
        if token not in ends:
            yield token
