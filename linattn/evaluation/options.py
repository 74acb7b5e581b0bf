"""Options of an evaluation. Imports nothing heavy: the command line reads its defaults from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from linattn.arguments import check_fields, option

TASKS = ("needle", "variables", "words")


@dataclass(frozen=True)
class EvaluateOptions:
    """What is measured of each model.

    Args:
        teacher: a model with the same tokens, measured too, from which the others' distributions are told.
        text: held-out UTF-8 files or patterns of them, all of which is read; none: the held-out part of Python's standard library.
        tokens: tokens of the text at most, from its beginning.
        context: tokens that a model sees of the text at a time, each time from an empty state.
        tasks: of ``"needle"`` (a number among sentences), ``"variables"`` (a chain of assignments), ``"words"`` (the most frequent word).
        lengths: tokens of the prompts of tasks, and of those that state and speed are measured behind.
        samples: prompts of each task and length.
        decode: tokens that are decoded to measure the speed; 0: speed and state are left out.
        device: where the models run; None: the accelerator if there is one.
        seed: of the prompts.
        out: folder of report.json and report.html; None: neither is written.

    Raises:
        ValueError: for values out of range, naming the field.
    """

    teacher: Path | None = option(None, "A model with the same tokens to compare with.", "FOLDER", shown="none")
    text: tuple[str | Path, ...] = option(
        (), "Held-out UTF-8 text or a quoted pattern; may be given again.", "FILES", shown="of Python's standard library"
    )
    tokens: int = option(100_000, "Tokens of the text at most.", "N", least=2)
    context: int = option(1024, "Tokens of the text at a time.", "T", least=2)
    tasks: tuple[str, ...] = option(TASKS, "Tasks of retrieval.", "A,B,...", separated=True, shown="needle,variables,words")
    lengths: tuple[int, ...] = option((512, 2048), "Tokens of a prompt.", "T,T,...", separated=True, shown="512,2048")
    samples: int = option(20, "Prompts of each task and length.", "N", least=1)
    decode: int = option(64, "Tokens decoded to measure speed; 0: none.", "N", least=0)
    device: str | None = option(None, "cpu, cuda or cuda:1.", "DEVICE", shown="the GPU if there is one")
    seed: int = option(0, "Of the prompts.", "S", least=0)
    out: Path | None = option(None, "Folder for report.json and report.html.", "DIR", shown="none")

    def __post_init__(self) -> None:
        check_fields(self)
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise ValueError(f"tasks must be of {', '.join(TASKS)}, but have {unknown[0]!r}")
        if short := [length for length in self.lengths if length < 1]:
            raise ValueError(f"lengths must be at least 1 token, but have {short[0]}")
