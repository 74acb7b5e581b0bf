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
    from linattn.generate.tokens import Tokens

BAR_FROM = 16384  # tokens of a prompt that is read behind a bar

Run = Annotated[
    Path,
    typer.Argument(help="A run of linattn train, one of its checkpoints, a published model's folder, or a GGUF file.", show_default=False),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="Device of the model, such as cuda.")]
Prompt = Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.", show_default=False)]
Temperature = Annotated[float, typer.Option(metavar="X", help="0 always takes the most likely token; higher values are more random.")]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Sample from the K most likely tokens.", show_default="all")]
TopP = Annotated[
    float | None,
    typer.Option(metavar="P", help="Sample from the most likely tokens with a total probability of P.", show_default="all"),
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given again.", show_default="none")]
Seed = Annotated[int | None, typer.Option(metavar="S", help="Seed of the sampling.", show_default="random")]


def check(prompt: str, stop: Sequence[str] | None) -> None:
    """Raise ValueError for an empty prompt or stop text."""
    if not prompt:
        raise ValueError("--prompt is empty: give the model a text to continue")
    if any(not s for s in stop or ()):
        raise ValueError("--stop is empty: give a text to stop at")


@dataclass(frozen=True)
class Decoding:
    """Options of how a text is read and continued; none of them changes it."""

    lookup: bool = option(False, "Draft tokens from earlier places of the text, and check several at once.")
    draft: Path | None = option(None, "Draft tokens with this small model of the same tokenizer, and check several at once.", "FOLDER",
                                shown="none")  # fmt: skip
    prefill_chunk: int = option(4096, "Read a prompt N tokens at a time; memory follows N.", "N", least=1)
    prefixes: Path | None = option(None, "Keep states behind every N tokens of a prompt here; an edited prompt goes on from them.",
                                   "FOLDER", shown="nowhere")  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)

    def load(self, device: str) -> dict[str, Any]:
        """Keywords of :func:`linattn.generate.stream`, with the small model on ``device``."""
        from linattn.train import load_run

        return {"lookup": self.lookup, "draft": None if self.draft is None else load_run(self.draft, device=device)[0]}

    def read(self, tokens: Tokens, count: int) -> None:
        """Let ``tokens`` read a prompt of ``count`` tokens, behind a bar on a terminal if they are many."""
        from linattn.state import PrefixStore

        store = None if self.prefixes is None else PrefixStore(self.prefixes)
        with _bar(count) as tell:
            tokens.read_prompt(piece=self.prefill_chunk, store=store, tell=tell)


@contextmanager
def _bar(count: int) -> Iterator[Callable[[int], None] | None]:
    """Bar of ``count`` tokens to call with how many have been read; None for few, and where there is no terminal."""
    from linattn.report.progress import Progress

    progress = Progress(count >= BAR_FROM)
    if not progress.bars:
        yield None
        return
    with progress.amount("reading the prompt", count) as tell:
        yield tell
