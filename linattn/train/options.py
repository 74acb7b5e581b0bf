"""What a training is asked for and what it gives. Imports nothing heavy: the command line reads its defaults from here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linattn.arguments import check_fields


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
        seed: of the weights and of the order of the data.
        save_every: steps between checkpoints; None: only at the end.
        eval_every: steps between validations; None: a tenth of the steps, at least 10.
        out: the run's folder; None: ``runs/`` and the mixer's name.
        resume: go on from the newest whole checkpoint in ``out``, or from the start if there is none yet.
        mixer_options: options of each mixer's constructor, by its name.
        ffn_options: options of each feed-forward's constructor, by its name.
    """

    mixer: str = "gla"
    text: tuple[str | Path, ...] = ()
    tokenizer: str | Path | None = None
    steps: int = 1000
    dim: int = 256
    layers: int = 4
    ffn: str = "swiglu"
    ffn_dim: int | None = None
    context: int = 256
    batch_size: int = 16
    learning_rate: float = 4e-3
    seed: int = 0
    save_every: int | None = None
    eval_every: int | None = None
    out: Path | None = None
    resume: bool = False
    mixer_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    ffn_options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        wanted = {"steps": 1, "context": 2, "batch_size": 1, "save_every": 1, "eval_every": 1}
        for name, least in wanted.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} must be an integer of at least {least}, but came as {value!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, but came as {self.seed!r}")
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
