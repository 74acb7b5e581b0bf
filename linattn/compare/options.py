"""Options of a comparison on text. The module imports nothing slow, because the command line reads its defaults."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from linattn.arguments import check_distinct, check_fields, command_line, option


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison. The first of ``mixers`` has the default feed-forward; the others' widths give equal parameters.

    Args:
        mixers: registered causal sequence mixers, each once, with options as in ``softmax:conv_width=4``.
        text: UTF-8 files or patterns of names for training; none: the source of Python's standard library.
        steps: optimizer steps of each model.
        dim: model width.
        layers: blocks of each model.
        contexts: lengths, in tokens, at which prefill, decode and state are measured.
        seed: the first seed of weights, order of the data and samples.
        seeds: models of each mixer, with the seeds ``seed``, ``seed`` + 1, ...
        out: folder of report.json, report.html and models/.
        learning_rate: peak rates: numbers, for every mixer, or strings ``"mixer=rate"``, for one. A mixer is trained at each of its rates;
            the best mean over the seeds is kept. Without one the rate is ``linattn.compare.rates.chosen``.
        train_context: tokens of a training sequence.
        batch_size: sequences of a step.
        sample_tokens: tokens of the sample continuation.
        patience: longest expected time of one measurement, in seconds; longer ones are skipped, with a note in the report.
        quick: whether the options are based on :data:`QUICK`, so that the report can name its command.
    """

    mixers: tuple[str, ...] = option(
        ("softmax", "softmax:conv_width=4", "gla", "mamba2", "gated_deltanet"),
        "Names from `linattn list`, with options as in softmax:conv_width=4, or all. The first has the usual feed-forward; the widths of "
        "the others' give all models the same number of parameters.",
        "A,B,...",
        separated=True,
    )
    text: tuple[str, ...] = option(
        (), "UTF-8 text for training; may be given several times.", "FILE", shown="the source of Python's standard library"
    )
    steps: int = option(400, "Optimizer steps for each model.", "N", least=1)
    dim: int = option(128, "Width of the models, a multiple of 32.", "D", least=1)
    layers: int = option(2, "Blocks of each model.", "L", least=1)
    contexts: tuple[int, ...] = option(
        (256, 512, 1024, 2048, 4096, 8192, 16384),
        "Context lengths, in tokens, at which prefill, decoding and state are measured.",
        "N,N,...",
        separated=True,
    )
    learning_rate: tuple[str | float, ...] = option(
        (),
        "Peak learning rates, for all mixers or, as in gla=0.008, for one. A mixer is trained at each of its rates and keeps the best.",
        "R,MIXER=R,...",
        shown="each mixer's best in a sweep, 0.004 for mixers without one",
        separated=True,
    )
    seed: int = option(0, "First seed of weights, order of the data and samples.", "S")
    seeds: int = option(2, "Models of each mixer, with the seeds S, S + 1, ...; other tasks mostly have 3.", "N", least=1)
    out: Path = option(
        Path("runs/compare"), "Folder of the report: a new or an empty one, or one with an earlier report, which is replaced.", "DIR"
    )
    train_context: int = option(128, least=1)
    batch_size: int = option(8, least=1)
    sample_tokens: int = option(240, least=1)
    patience: float = 20.0
    quick: bool = option(False, "Small models and few steps, to test in under a minute that everything works.")

    def __post_init__(self) -> None:
        check_fields(self)
        check_distinct("mixers", self.mixers)
        self.rates()
        if not 0 <= self.seed <= 2**32 - self.seeds:
            raise ValueError(f"seed must be from 0 to 2**32 - {self.seeds}, but came as {self.seed}")
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"contexts must be token counts of at least 1, but came as {list(self.contexts)}")

    def rates(self) -> dict[str, list[float]]:
        """The learning rates given for each mixer, ascending; empty lists for those that have the sweep's."""
        found: dict[str, list[float]] = {mixer: [] for mixer in self.mixers}
        for given in self.learning_rate:
            mixer, _, text = str(given).rpartition("=")
            if mixer and mixer not in found:
                raise ValueError(f"learning_rate must name mixers of this comparison ({', '.join(self.mixers)}), but names {given!r}")
            rate = _number(text)
            for name in [mixer] if mixer else self.mixers:
                if not 0 < rate < math.inf or rate in found[name]:
                    raise ValueError(f"learning_rate must be different positive and finite rates, but came as {list(self.learning_rate)}")
                found[name].append(rate)
        return {name: sorted(rates) for name, rates in found.items()}

    def command(self) -> str:
        """Command line with these options."""
        asked = ("mixers", "contexts", "text", "steps", "dim", "layers", "learning_rate", "seed", "seeds", "out")
        words = command_line(self, asked, QUICK if self.quick else CompareOptions())
        return shlex.join(["linattn", "compare", *(["--quick"] if self.quick else []), *words])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


QUICK = CompareOptions(
    steps=12, dim=64, contexts=(256, 1024), seeds=1, batch_size=4, sample_tokens=64, patience=5.0, quick=True
)  # of ``--quick``
