"""The options of a comparison on text. Imports nothing heavy: the command line reads its defaults from here."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from linattn.arguments import check_distinct, check_fields, command_line, option


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison. The first of ``mixers`` has the usual feed-forward; the width of the others' makes the parameters equal.

    Args:
        mixers: names of registered causal sequence mixers, each once.
        text: UTF-8 files, or patterns of names, to learn from; none: the source of Python's standard library.
        steps: optimizer steps of each model.
        dim: model width.
        layers: blocks of each model.
        contexts: lengths, in tokens, at which prefill, decode and state are measured.
        seed: of weights, order of the data and samples.
        out: folder of report.json, report.html and models/.
        learning_rate: peak rates; each mixer is trained at each and keeps the one that validates best.
        train_context: tokens of a training sequence.
        batch_size: sequences of a step.
        sample_tokens: tokens of the sample continuation.
        patience: seconds that one measurement may be expected to take; a longer one is left out, with a note in the report.
        quick: whether the options began as :data:`QUICK` (so that the report can name its command).
    """

    mixers: tuple[str, ...] = option(
        ("softmax", "gla", "mamba2", "gated_deltanet"),
        "Names from `linattn list`, or all. The first has the usual feed-forward; the others' are as wide as equal parameters need.",
        "A,B,...",
        separated=True,
    )
    text: tuple[str, ...] = option(
        (), "UTF-8 text to learn from; may be given several times.", "FILE", shown="the source of Python's standard library"
    )
    steps: int = option(400, "Optimizer steps for each model.", "N", least=1)
    dim: int = option(128, "Width of the models, a multiple of 32.", "D", least=1)
    layers: int = option(2, "Blocks of each model.", "L", least=1)
    contexts: tuple[int, ...] = option(
        (256, 512, 1024, 2048, 4096, 8192, 16384),
        "Tokens before which prefill, decode and state are measured.",
        "N,N,...",
        separated=True,
    )
    learning_rate: tuple[float, ...] = option(
        (4e-3,), "Peak learning rates: each mixer is trained at each and keeps its best.", "R,R,...", separated=True
    )
    seed: int = option(0, "Seed of weights, order of the data and samples.", "S")
    out: Path = option(
        Path("runs/compare"), "Folder of the report: a new or an empty one, or one with an earlier report, which is replaced.", "DIR"
    )
    train_context: int = option(128, least=1)
    batch_size: int = option(8, least=1)
    sample_tokens: int = option(240, least=1)
    patience: float = 20.0
    quick: bool = option(False, "Small models, few steps: does everything work, in under a minute?")

    def __post_init__(self) -> None:
        check_fields(self)
        check_distinct("mixers", self.mixers)
        rates = self.learning_rate
        if not rates or not all(0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
            raise ValueError(f"learning_rate must be positive and finite rates, each once, but came as {list(rates)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, but came as {self.seed}")
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"contexts must be token counts of at least 1, but came as {list(self.contexts)}")

    def command(self) -> str:
        """The command line that asks for the same."""
        asked = ("mixers", "contexts", "text", "steps", "dim", "layers", "learning_rate", "seed", "out")
        words = command_line(self, asked, QUICK if self.quick else CompareOptions())
        return shlex.join(["linattn", "compare", *(["--quick"] if self.quick else []), *words])


QUICK = CompareOptions(
    steps=12, dim=64, contexts=(256, 1024), batch_size=4, sample_tokens=64, patience=5.0, quick=True
)  # ``--quick``: does everything work, in less than a minute
