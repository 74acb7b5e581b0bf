"""Arguments and options of commands that generate text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linattn.arguments import check_fields, option

if TYPE_CHECKING:
    import torch

    from linattn.generate.tokens import Tokens

BAR_FROM = 16384  # tokens of a prompt from which on its reading has a progress bar

Run = Annotated[
    Path,
    typer.Argument(help="A run of linattn train, one of its checkpoints, a published model's folder, or a GGUF file.", show_default=False),
]
Prompt = Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.", show_default=False)]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given again.", show_default=False)]


def check(prompt: str, stop: Sequence[str] | None) -> None:
    """Raise ValueError for an empty prompt or stop text."""
    if not prompt:
        raise ValueError("--prompt is empty: give the model a text to continue")
    if any(not s for s in stop or ()):
        raise ValueError("--stop is empty: give a text to stop at")


@dataclass(frozen=True)
class Sampled:
    """Options of the choice of each token, and the device of the model."""

    temperature: float = option(0.8, "0 always takes the most likely token; higher values are more random.", "X")
    top_k: int | None = option(None, "Sample from the K most likely tokens.", "K", shown="all")
    top_p: float | None = option(None, "Sample from the most likely tokens with a total probability of P.", "P", shown="all")
    seed: int | None = option(None, "Seed of the sampling.", "S", shown="random")
    device: str = option("cpu", "Device of the model, such as cuda.", "DEVICE")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Decoding(Sampled):
    """Options of reading and continuing a text; those that :class:`Sampled` lacks affect speed and memory only."""

    lookup: bool = option(False, "Draft tokens by copying from the text so far, and check several at once.")
    draft: Path | None = option(None, "Draft tokens with this small model of the same tokenizer, and check several at once.", "FOLDER")
    prefill_chunk: int = option(4096, "Read a prompt N tokens at a time; smaller values need less memory.", "N", least=1)
    prefixes: Path | None = option(
        None, "Save the states of prompts in this folder; a prompt that begins like an earlier one continues from its state.", "FOLDER"
    )

    def keywords(self, generator: torch.Generator) -> dict[str, Any]:
        """Keywords of :func:`linattn.generate.stream`; loads the small model."""
        from linattn.train import load_run

        draft = None if self.draft is None else load_run(self.draft, device=self.device)[0]
        sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "generator": generator}
        return {**sampling, "lookup": self.lookup, "draft": draft}

    def read(self, tokens: Tokens, count: int) -> None:
        """Let ``tokens`` read a prompt of ``count`` tokens, with a progress bar on a terminal if they are many."""
        from linattn.state import PrefixStore

        store = None if self.prefixes is None else PrefixStore(self.prefixes)
        with _bar(count) as tell:
            tokens.read_prompt(piece=self.prefill_chunk, store=store, tell=tell)


@contextmanager
def _bar(count: int) -> Iterator[Callable[[int], None] | None]:
    """Progress bar of ``count`` tokens, a function of the number read so far; None for few tokens, and without a terminal."""
    from linattn.report.progress import Progress

    progress = Progress(count >= BAR_FROM)
    if not progress.bars:
        yield None
        return
    with progress.amount("reading the prompt", count) as tell:
        yield tell
