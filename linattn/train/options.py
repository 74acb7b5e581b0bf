"""What a training is asked for and what it gives. Imports nothing heavy: the command line reads its defaults from here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linattn.arguments import check_fields, option


class Terminated(RuntimeError):
    """The training was asked to end by SIGTERM; it has written a checkpoint before it did."""


@dataclass(frozen=True)
class TrainOptions:
    """One training run.

    Args:
        mixer: pattern of mixer names such as ``"gla*3, softmax"``.
        text: UTF-8 files or patterns of them; none: the source of Python's standard library.
        tokenizer: a Hugging Face ``tokenizer.json``; None: one token per byte.
        steps: optimizer steps.
        dim: model width.
        layers: blocks.
        ffn: pattern of feed-forward names such as ``"swiglu, switch"``.
        ffn_dim: inner width of the feed-forwards; None: 8/3 of dim.
        context: tokens of one sequence.
        batch_size: sequences of one step, on each process.
        learning_rate: its peak, after a linear warm-up over the first twentieth of the steps; a cosine takes it to 0.
        save_every: steps between checkpoints; None: only at the end.
        eval_every: steps between validations; None: a tenth of the steps, at least 10.
        seed: of the weights and of the order of the data.
        out: the run's folder; None: ``runs/`` and the mixer's name.
        resume: go on from the newest whole checkpoint in ``out``, or from the start if there is none yet.
        mixer_options: options of each mixer's constructor, by its name.
        ffn_options: options of each feed-forward's constructor, by its name.
    """

    mixer: str = option("gla", 'Mixer of each layer, repeated to fill them, e.g. "gla*3, softmax".', "PATTERN")
    text: tuple[str | Path, ...] = option(
        (), "UTF-8 text or a quoted pattern; may be given again.", "FILES", shown="Python's standard library"
    )
    tokenizer: str | Path | None = option(None, "A Hugging Face tokenizer.json.", "FILE", shown="a token per byte")
    steps: int = option(1000, "Optimizer steps.", "N", least=1)
    dim: int = option(256, "Model width.", "D")
    layers: int = option(4, "Number of blocks.", "L")
    ffn: str = option("swiglu", 'Feed-forward of each layer, e.g. "swiglu, switch" or "none".', "PATTERN")
    ffn_dim: int | None = None
    context: int = option(256, "Tokens of one sequence.", "T", least=2)
    batch_size: int = option(16, "Sequences of a step, on each process.", "B", least=1)
    learning_rate: float = option(4e-3, "At its peak.", "R")
    save_every: int | None = option(None, "Steps between checkpoints.", "N", shown="at the end", least=1)
    eval_every: int | None = option(None, "Steps between validations.", "N", shown="steps / 10", least=1)
    seed: int = option(0, "Of weights and order of the data.", "S")
    out: Path | None = option(None, "The run's folder.", "DIR", shown="runs/MIXER")
    resume: bool = option(False, "Go on with the run in DIR, with its options.")
    mixer_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    ffn_options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, but came as {self.seed!r}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, but came as {self.learning_rate!r}")

    @property
    def folder(self) -> Path:
        """Where the run is written."""
        if self.out is not None:
            return Path(self.out)
        return Path("runs") / "-".join("".join(c if c.isalnum() or c == "_" else " " for c in self.mixer).split())


@dataclass(frozen=True)
class TrainResult:
    """What came of it.

    Args:
        run: the run's folder.
        parameters: number of trained values.
        history: one dict per validation: step, tokens, train_loss (nats per token, mean since the last one),
            validation_bits_per_byte, seconds (of training alone, interrupted runs added up); of a model with mixtures of experts also
            dropped, the share of the tokens since the last one that no expert had room for, on the first process.
        validation_bits_per_byte: the last one.
        tokens_per_second: over the whole training.
        corpus_sha256: of the text and the tokenizer.
    """

    run: Path
    parameters: int
    history: list[dict[str, Any]]
    validation_bits_per_byte: float
    tokens_per_second: float
    corpus_sha256: str
