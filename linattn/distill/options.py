"""Options and result of a conversion. The module imports nothing slow, because the command line reads its defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linattn.arguments import check_fields, option

DTYPES = ("bf16", "fp32")


@dataclass(frozen=True)
class ConvertOptions:
    """One conversion of a softmax model.

    Args:
        mixer: pattern of mixer names such as ``"gated_deltanet*3, softmax"``; the layers named softmax keep the teacher's.
        text: UTF-8 files or glob patterns; empty: the source of Python's standard library.
        out: the folder of the result.
        keep: number of layers that stay softmax, chosen by KL after the first stage; ``mixer`` must not name softmax then.
        keep_layers: layers that stay softmax, counted from 0; ``mixer`` must not name softmax then.
        start: a conversion of the same teacher whose weights the student starts from, in place of the closed-form initialisation; layers
            that are softmax in the student and not there are the teacher's. One first stage then serves several choices of layers.
        rotary: ``"keep"`` or ``"drop"``: rotary positions of the layers that stay softmax.
        tokens1: tokens of the first stage, in which each mixer learns its layer's attention output; 0 skips it.
        tokens2: tokens of the second stage, KL of the logits; 0 skips it.
        tokens3: tokens of the third stage, cross-entropy at ``context3``; 0 skips it.
        rate1: initial learning rate of the first stage, which falls to a hundredth by a cosine. None: 1e-3 at width 4096, in inverse
            proportion to the root of the width.
        rate2: initial learning rate of the second stage, which falls to a tenth by a cosine; the third stage has that tenth. None: 6e-4
            at width 576, in inverse proportion to the width.
        context: tokens of one sequence in the first two stages.
        context3: tokens of one sequence in the third stage; None: four times ``context``.
        batch_size: sequences of one step at ``context``; the third stage takes as many tokens.
        accumulate: number of parts that a step's batch is divided into, to save memory.
        dtype: ``"bf16"`` computes under autocast, ``"fp32"`` does not; None: bf16 on a GPU. Weights are float32 in both cases.
        device: device to train on; None: the accelerator if there is one.
        save_every: steps between validations, each followed by a checkpoint; None: a tenth of the stage, at least 10.
        tokenizer: a Hugging Face ``tokenizer.json``; None: the teacher's, or one token per byte.
        calibrate: initialise by least squares: open output gates, fit output projections to the teacher's attention.
        seed: seed of new weights and of the order of the data.
        resume: continue from the newest complete checkpoint in ``out``, or from the start if there is none.
        mixer_options: options of each new mixer's constructor, by its name; they override those derived from the teacher.
    """

    mixer: str = option("gated_deltanet*3, softmax", "Mixer of each layer, repeated to fill them; softmax: the teacher's.", "PATTERN")
    text: tuple[str | Path, ...] = option(
        (), "UTF-8 text or a quoted pattern; may be given again.", "FILES", shown="Python's standard library"
    )
    out: Path | None = option(None, "The folder of the result.", "DIR", shown="TEACHER-linear")
    keep: int | None = option(None, "Keep N layers softmax, chosen by KL.", "N", shown="by pattern", least=0)
    keep_layers: tuple[int, ...] | None = option(None, "Keep these layers softmax.", "I,I,...", shown="by pattern", separated=True)
    start: Path | None = option(None, "Start from this conversion of the same teacher.", "DIR")
    rotary: str = option("keep", "Rotary positions of softmax layers: keep or drop.", "keep|drop")
    tokens1: int = option(20_000_000, "Tokens of stage 1, mixer outputs; 0: none.", "N", least=0)
    tokens2: int = option(40_000_000, "Tokens of stage 2, KL of the logits; 0: none.", "N", least=0)
    tokens3: int = option(0, "Tokens of stage 3, cross-entropy at a longer context; 0: none.", "N", least=0)
    rate1: float | None = option(None, "Learning rate of stage 1, falling to a hundredth.", "R", shown="1e-3 * sqrt(4096 / width)")
    rate2: float | None = option(None, "Learning rate of stages 2 and 3.", "R", shown="6e-4 * 576 / width")
    context: int = option(512, "Tokens of a sequence in stages 1 and 2.", "T", least=2)
    context3: int | None = option(None, "Tokens of a sequence in stage 3.", "T", shown="4 * context", least=2)
    batch_size: int = option(16, "Sequences of a step.", "B", least=1)
    accumulate: int = option(1, "Parts that a step is divided into, to save memory.", "N", least=1)
    dtype: str | None = option(None, "Precision of the computation; weights are float32.", "bf16|fp32", shown="bf16 on a GPU")
    device: str | None = option(None, "Device to train on.", "DEVICE", shown="a GPU if there is one")
    save_every: int | None = option(None, "Steps between validations with a checkpoint.", "N", shown="stage / 10", least=1)
    tokenizer: str | Path | None = option(None, "A Hugging Face tokenizer.json.", "FILE", shown="the teacher's")
    calibrate: bool = True
    seed: int = option(0, "Seed of new weights and order of the data.", "S")
    resume: bool = option(False, "Continue the conversion in DIR.")
    mixer_options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value, choices in (("rotary", self.rotary, ("keep", "drop")), ("dtype", self.dtype, (*DTYPES, None))):
            if value not in choices:
                raise ValueError(f"{name} must be {' or '.join(repr(c) for c in choices)}, but came as {value!r}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, but came as {self.seed!r}")
        for name in ("rate1", "rate2"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, but came as {value!r}")
        if self.keep is not None and self.keep_layers is not None:
            raise ValueError("keep and keep_layers exclude each other: one number of layers chosen by KL, or the layers themselves")
        if self.batch_size % self.accumulate:
            raise ValueError(f"accumulate must divide batch_size = {self.batch_size}, but came as {self.accumulate}")


@dataclass(frozen=True)
class ConvertResult:
    """A finished conversion.

    Args:
        folder: the result, which :func:`linattn.load` reads.
        kept: layers that are still softmax.
        history: one dict per validation, as in ``log.jsonl``: stage, step, tokens, seconds, the stage's ``loss`` in training and
            ``kl`` (nats per token from the teacher's next-token distribution to the student's), ``top1`` (share of tokens on which
            both choose the same), ``bits_per_byte`` of held-out text; in the first stage also ``output_error``, the normalised squared
            error of each replaced mixer's output.
        teacher_bits_per_byte: bits per byte of the teacher on the same text.
    """

    folder: Path
    kept: tuple[int, ...]
    history: list[dict[str, Any]]
    teacher_bits_per_byte: float

    @property
    def gap_closed(self) -> float:
        """Share of the untrained student's KL from the teacher that the conversion removes."""
        return 1 - self.history[-1]["kl"] / self.history[0]["kl"] if self.history[0]["kl"] else 1.0
