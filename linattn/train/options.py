"""Options and result of a training run. The module imports nothing slow, because the command line reads its defaults."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.arguments import check_fields, option


class Terminated(RuntimeError):
    """Training ended by SIGTERM or Ctrl-C, after a checkpoint was written. ``signal`` is the signal's number."""

    def __init__(self, number: int, step: int, folder: str) -> None:
        self.signal = number
        how = "interrupted" if number == signal.SIGINT else "terminated"
        super().__init__(f"{how} after step {step}, which is saved: continue with linattn train --resume --out {folder}")


CHOICES = {
    "norm": ("rms", "zero_centered_rms", "layer"),
    "dtype": ("bf16", "fp32"),
    "optimizer": ("adamw", "muon"),
    "schedule": ("cosine", "wsd", "linear", "constant"),
}
REPORTS = ("tensorboard", "wandb")


@dataclass(frozen=True)
class TrainOptions:
    """One training run.

    Args:
        mixer: pattern of mixer names such as ``"gla*3, softmax"``.
        heads: heads of each mixer that has heads; None: each mixer's default.
        mixer_options: options of each mixer's constructor, by its name; they precede ``heads``.
        text: UTF-8 files or glob patterns; empty: the source of Python's standard library.
        tokenizer: a Hugging Face ``tokenizer.json``; None: one token per byte.
        data: a folder that :func:`linattn.data.prepare` wrote, in place of ``text`` and ``tokenizer``; its documents are
            isolated from each other.
        join_documents: let states, attention and labels cross the borders of the documents in ``data``.
        steps: optimizer steps.
        dim: model width.
        layers: blocks.
        ffn: pattern of feed-forward names such as ``"swiglu, switch"``.
        ffn_dim: inner width of the feed-forwards; None: 8/3 of dim.
        ffn_options: options of each feed-forward's constructor, by its name.
        norm: norms around the layers: ``"rms"``, ``"zero_centered_rms"`` (Qwen3-Next's) or ``"layer"``.
        context: tokens of one sequence.
        batch_size: sequences of one forward pass, on each process, or on each ``tp`` x ``cp`` processes that share them.
        accumulate: forward and backward passes whose gradients are summed for one step.
        dtype: ``"bf16"``: matrix products in bfloat16 under autocast; parameters, optimizer and recurrent states stay float32. ``"fp32"``:
            everything in float32. None: bf16 on an NVIDIA GPU, else fp32.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``; None: the accelerator if there is one.
        compile: compile each block, and what happens to the logits of a chunk, by ``torch.compile``.
        checkpoint_activations: save only the inputs of the blocks and recompute their activations in the backward pass.
        fsdp: shard parameters, gradients and optimizer over the processes (FSDP2); in one process it changes nothing.
        tp: processes that share the heads of each mixer and the channels of each feed-forward; more than 1 implies ``fsdp``.
        cp: processes that share each sequence; the others have sequences of their own.
        optimizer: ``"adamw"``, or ``"muon"`` for the matrices of the blocks beside AdamW for the other parameters.
        learning_rate: peak, reached after the warm-up. Muon's updates are scaled to the size of AdamW's and use the same rate.
        schedule: learning rate after the warm-up: ``"cosine"`` and ``"linear"`` fall to 0 at the last step, ``"wsd"`` stays at
            the peak and falls to 0 over the last fifth of the steps, ``"constant"`` stays.
        warmup: steps of the linear warm-up; None: a twentieth of the steps.
        weight_decay: factor for matrices and embeddings; norms, biases and time constants are not decayed.
        max_grad_norm: norm to which gradients are clipped; 0: no clipping.
        z_loss: factor of the mean squared logarithm of the softmax's denominator, added to the loss in training.
        loss_chunk: tokens whose logits are computed at a time, with the gradient of each chunk right after its loss; None: all
            tokens, or as many as make 256 MB of float32 logits if that is fewer.
        save_every: steps between checkpoints; None: only at the end.
        eval_every: steps between validations; None: a tenth of the steps, at least 10.
        eval_tokens: tokens of a validation, in windows evenly spaced over the held-out text.
        report_to: ``"tensorboard"`` and ``"wandb"``, through the integrations of transformers.
        seed: seed of the initial weights and of the order of the data.
        out: the run's folder; None: ``runs/`` and the mixer's name.
        resume: continue from the newest complete checkpoint in ``out``, or from the start if there is none.

    Raises:
        ValueError: for values out of range, naming the field.
    """

    mixer: str = option("gla", 'Mixer of each layer, repeated to fill them, e.g. "gla*3, softmax".', "PATTERN")
    heads: int | None = option(None, "Heads of each mixer that has heads.", "H", shown="each mixer's own", least=1)
    mixer_options: dict[str, dict[str, Any]] = option(
        {}, "An option of a mixer's constructor, such as gla.heads=8; may be given again.", "NAME.OPTION=VALUE"
    )
    text: tuple[str | Path, ...] = option(
        (), "UTF-8 text or a quoted pattern; may be given again.", "FILES", shown="Python's standard library"
    )
    tokenizer: str | Path | None = option(None, "A Hugging Face tokenizer.json.", "FILE", shown="a token per byte")
    data: str | Path | None = option(None, "A folder of linattn data prepare, in place of --text.", "DIR")
    join_documents: bool = option(False, "Let states and attention cross the borders of documents.")
    steps: int = option(1000, "Optimizer steps.", "N", least=1)
    dim: int = option(256, "Model width.", "D")
    layers: int = option(4, "Number of blocks.", "L")
    ffn: str = option("swiglu", 'Feed-forward of each layer, e.g. "swiglu, switch" or "none".', "PATTERN")
    ffn_dim: int | None = option(None, "Inner width of the feed-forwards.", "D", shown="8/3 of the model width", least=1)
    ffn_options: dict[str, dict[str, Any]] = option(
        {}, "An option of a feed-forward's constructor, such as switch.count=8; may be given again.", "NAME.OPTION=VALUE"
    )
    norm: str = option("rms", "Norms around the layers: rms, zero_centered_rms (Qwen3-Next's) or layer.", "NAME")
    context: int = option(256, "Tokens of one sequence.", "T", least=2)
    batch_size: int = option(16, "Sequences of a forward pass, on each process.", "B", least=1)
    accumulate: int = option(1, "Forward and backward passes per step.", "N", least=1)
    dtype: str | None = option(None, "bf16 or fp32; weights stay float32.", "TYPE", shown="bf16 on a GPU, else fp32")
    device: str | None = option(None, "cpu, cuda or cuda:1.", "DEVICE", shown="the GPU if there is one")
    compile: bool = option(False, "Compile the blocks and the loss by torch.compile.")
    checkpoint_activations: bool = option(False, "Save only block inputs; recompute activations.")
    fsdp: bool = option(False, "Shard parameters, gradients and optimizer over the processes.")
    tp: int = option(1, "Processes that share the heads of each mixer; implies --fsdp.", "N", least=1)
    cp: int = option(1, "Processes that share each sequence.", "N", least=1)
    optimizer: str = option("adamw", "adamw, or muon for the matrices of the blocks.", "NAME")
    learning_rate: float = option(4e-3, "Peak learning rate.", "R")
    schedule: str = option("cosine", "cosine, wsd, linear or constant, after the warm-up.", "NAME")
    warmup: int | None = option(None, "Steps of the linear warm-up.", "N", shown="steps / 20", least=0)
    weight_decay: float = option(0.1, "Weight decay of matrices and embeddings.", "W", least=0)
    max_grad_norm: float = option(1.0, "Norm to clip gradients to; 0 disables clipping.", "G", least=0)
    z_loss: float = option(0.0, "Factor of the squared log of the softmax's denominator.", "Z", least=0)
    loss_chunk: int | None = option(None, "Tokens whose logits are computed at a time.", "N", shown="256 MB of logits", least=1)
    save_every: int | None = option(None, "Steps between checkpoints.", "N", shown="at the end", least=1)
    eval_every: int | None = option(None, "Steps between validations.", "N", shown="steps / 10", least=1)
    eval_tokens: int = option(1 << 14, "Tokens of each validation.", "N", least=1)
    report_to: tuple[str, ...] = option((), "tensorboard, wandb or both.", "NAME,...", separated=True)
    seed: int = option(0, "Seed of weights and order of the data.", "S")
    out: str | Path | None = option(None, "The run's folder.", "DIR", shown="runs/MIXER")
    resume: bool = option(False, "Continue the run in DIR with its options; a higher --steps extends it.")

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1, but came as {self.seed!r}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, but came as {self.learning_rate!r}")
        if self.join_documents and self.data is None:
            raise ValueError("join_documents needs data, a folder of linattn data prepare: give one, or omit join_documents")
        if self.data is not None and (self.text or self.tokenizer is not None):
            raise ValueError("data already holds tokens: omit text and tokenizer")
        for name in ("weight_decay", "max_grad_norm", "z_loss"):
            if getattr(self, name) == math.inf:
                raise ValueError(f"{name} must be finite, but came as inf")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in (*choices, *([None] if name == "dtype" else [])):
                raise ValueError(f"{name} must be {_either(choices)}, but came as {getattr(self, name)!r}")
        for name in self.report_to:
            if name not in REPORTS:
                raise ValueError(f"report_to must be of {_either(REPORTS)}, but has {name!r}")

    @property
    def folder(self) -> Path:
        """The run's folder: ``out``, or ``runs/`` and the mixer's name."""
        if self.out is not None:
            return Path(self.out)
        return Path("runs") / "-".join("".join(c if c.isalnum() or c == "_" else " " for c in self.mixer).split())


@dataclass(frozen=True)
class TrainResult:
    """Result of a training run.

    Args:
        run: the run's folder.
        parameters: number of trained values.
        history: one dict per validation: step, tokens, train_loss (nats per token, mean since the last one),
            validation_bits_per_byte, seconds (of training without validation, summed over interrupted runs); for a model with
            mixtures of experts also dropped, the share of tokens since the last validation that exceeded the experts' capacity, on
            the first process.
        validation_bits_per_byte: of the last validation.
        tokens_per_second: mean over the whole training.
        corpus_sha256: digest of the text and the tokenizer.
    """

    run: Path
    parameters: int
    history: list[dict[str, Any]]
    validation_bits_per_byte: float
    tokens_per_second: float
    corpus_sha256: str


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(map(repr, names))
