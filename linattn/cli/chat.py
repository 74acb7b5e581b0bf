"""``linattn chat``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from linattn.cli.options import options_of, takes
from linattn.cli.sampling import Decoding, Run

if TYPE_CHECKING:
    from linattn.generate.tokens import Tokens


@takes(*options_of(Decoding))
def chat(
    given: dict[str, Any],
    run: Run,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens of a reply.")] = 256,
    stop: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Text that ends a reply. [default: the chat template's end token, else the end of a line]",
            show_default=False,
        ),
    ] = None,
    load_state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Continue the conversation in this file.", show_default=False)
    ] = None,
    save_state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the conversation here after every reply.", show_default=False),
    ] = None,
) -> None:
    """Chat with a trained model, one line and one reply at a time.

    A chat template beside the model formats the turns. The state alone holds the conversation; its size in bytes is shown after every
    reply and stays constant for recurrent mixers. The end of the input (Ctrl-D) ends the conversation.
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
    if save_state is not None:  # fail now, not after the first reply
        writable(save_state)
    decoding = Decoding(**given)
    random = generator(decoding.seed, decoding.device)
    model, codec = load_run(run, device=decoding.device)
    turns = _turns(run, model, stop)
    state = None if load_state is None else State.load(load_state, model=model)
    keywords = decoding.keywords(random)
    reply: Callable[..., Tokens] = partial(stream, model, max_new_tokens=max_new_tokens, stop=turns.stops, **keywords)
    reply([0], state=state)  # reads no token; raises for invalid arguments before the user types
    texts = [stop or turns.end] if stop or not turns.stops else []
    for line in _lines():
        ids = codec.encode(turns.first(line) if state is None else turns.later(line))
        tokens = reply(ids, state=state)
        decoding.read(tokens, len(ids))
        reply_tokens: list[int] = []
        with Status() as status:
            for piece in stream_text(_recorded(status.watch(tokens), reply_tokens, turns.stops), codec.stream(), texts):
                print(printable(piece), end="", flush=True)
            print()
        state = tokens.state
        if turns.end not in codec.decode(reply_tokens):  # cut short by --max-new-tokens or --stop
            _, state = prefill(model.model, torch.tensor([codec.encode(turns.end)], device=model.device), state)
        if save_state is not None:
            state.save(save_state, model=model)


def _lines() -> Iterator[str]:
    """Iterate over the lines that the user types, without empty ones."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


class _Turns(Protocol):
    """Format of a conversation: text around each user turn, stop tokens, and the end text to append to a reply that was cut short."""

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
    """Load the chat template beside the model, which needs transformers; one line per turn if there is none."""
    if not run.is_dir() or any((run / name).is_file() for name in ("tokenizer_config.json", "chat_template.jinja")):
        from linattn.hf.chat import chat_of

        if (chat := chat_of(run, model)) is not None:
            return chat
    return _Lines(stop or "\n")


def _recorded(tokens: Iterator[int], record: list[int], ends: Collection[int]) -> Iterator[int]:
    """Append all ``tokens`` to ``record`` and yield those that are not among the stop tokens ``ends``."""
    for token in tokens:
        record.append(token)
        if token not in ends:
            yield token
