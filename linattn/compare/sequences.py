"""Sequence-to-sequence tasks: reversing or sorting letters, tested at other lengths than in training."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import mixers
from linattn.compare.tasks import Recipe
from linattn.experiment.study import Column
from linattn.models import Seq2SeqConfig, Seq2SeqModel
from linattn.models.seq2seq import STOP
from linattn.models.stack import sequence_misfit
from linattn.report.words import figure, percent

LETTERS = 12  # tokens 1 to 12; 0 ends a sequence
LEARNED = (3, 4, 5, 6, 8, 9, 10, 12)  # lengths in training
BETWEEN, BEYOND = (7, 11), (13, 14)  # lengths in the test
PLACES = 20  # positions of a model, more than the longest sequence
ASKED = 128  # test sequences of each length
_OURS = ("softmax", "cosformer", "linear_transformer")
Pairs = list[tuple[Tensor, Tensor]]  # sources [B, n] and targets [B, n + 1], whose last token is the stop; one length each


class SequenceTask:
    """Sequences of random letters, and the targets that ``write`` makes of them."""

    full = Recipe(mixers=_OURS, steps=1500, dim=64, layers=2, batch_size=64, learning_rate=3e-3)
    quick = Recipe(mixers=_OURS, steps=20, dim=32, layers=1, batch_size=32, learning_rate=3e-3, seeds=1)
    figures = (
        Column("between", "right, lengths between", percent, spread=True),
        Column("beyond", "right, longer ones", percent, spread=True),
        Column("tokens_per_second", "tokens written/s", figure, spread=True),
    )

    def __init__(self, title: str, doing: str, write: Callable[[Tensor], Tensor]) -> None:
        self.title = title
        learned, between, beyond = (", ".join(map(str, lengths)) for lengths in (LEARNED, BETWEEN, BEYOND))
        self.question = (
            f"Small encoder-decoders of equal size learn to write {doing}, with lengths of {learned} letters. They are judged by the share "
            f"of sequences that greedy decoding writes without any error, at lengths that were not trained: {between}, and {beyond}."
        )
        self._write = write

    @cached_property
    def asked(self) -> dict[str, Pairs]:
        """Fixed test sequences, by figure."""
        with torch.device("cpu"):
            generator = torch.Generator().manual_seed(0)
            lengths = {"between": BETWEEN, "beyond": BEYOND}
            return {key: [self._drawn(ASKED, n, generator) for n in several] for key, several in lengths.items()}

    def _drawn(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        source = torch.randint(1, LETTERS + 1, (count, length), generator=generator)
        return source, F.pad(self._write(source), (0, 1), value=STOP)

    def facts(self) -> dict[str, Any]:
        digest = hashlib.sha256(b"".join(source.numpy().tobytes() for pairs in self.asked.values() for source, _ in pairs))
        counts = {"letters": LETTERS, "sequences asked": sum(len(source) for pairs in self.asked.values() for source, _ in pairs)}
        return {"name": "random letters, new ones for every step", "sha256": digest.hexdigest(), **counts}

    def mixers(self) -> list[str]:
        return decoders()

    def model(self, mixer: str, recipe: Recipe, ffn_dim: int | None) -> Seq2SeqModel:
        config = Seq2SeqConfig(
            source_vocab=LETTERS + 1, target_vocab=LETTERS + 1, length=PLACES, dim=recipe.dim, layers=recipe.layers, ffn_dim=ffn_dim,
            spread=True, **roles(mixer),
        )  # fmt: skip
        return Seq2SeqModel(config)

    def batches(self, recipe: Recipe, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            length = LEARNED[int(torch.randint(len(LEARNED), (), generator=generator))]
            yield self._drawn(recipe.batch_size, length, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        source, target = batch
        return target_loss(cast(Seq2SeqModel, model), source, None, target, target != -1)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {key: _right(cast(Seq2SeqModel, model), pairs) for key, pairs in self.asked.items()}

    def measure(self, model: nn.Module) -> dict[str, float]:
        source, _ = self.asked["beyond"][-1]
        return {"tokens_per_second": written_per_second(cast(Seq2SeqModel, model), source, None)}


def decoders() -> list[str]:
    """Names of the mixers that a decoder can have."""
    misfit = sequence_misfit(causal=True)
    return [name for name in mixers.available() if misfit(mixers.info(name)) is None]


def roles(mixer: str) -> dict[str, Any]:
    """Encoder, decoder and cross mixer for ``mixer``; softmax if it has no cross-attention form."""
    cross = f"cross_{mixer}"
    return {"encoder": mixer, "decoder": mixer, "cross": cross if cross in mixers.available() else "cross_softmax"}


def target_loss(model: Seq2SeqModel, source: Tensor, mask: Tensor | None, target: Tensor, real: Tensor) -> Tensor:
    """Cross entropy of ``target`` [B, T], whose last token is the stop, where ``real`` [B, T], each token given those before it."""
    begun = F.pad(target[:, :-1], (1, 0), value=STOP)
    return F.cross_entropy(model(source, begun, mask)[real], target[real])


def written_per_second(model: Seq2SeqModel, source: Tensor, mask: Tensor | None, repeats: int = 3) -> float:
    """Decoded tokens per second of all rows in one batch, including stop tokens."""
    taken, count = [], 0
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        count = sum(len(row) + 1 for row in model.decode(source, mask))
        taken.append(time.perf_counter() - begin)
    return count / statistics.median(taken[1:])  # the first is warm-up


def _right(model: Seq2SeqModel, pairs: Pairs) -> float:
    """Share of sources whose target is decoded without error."""
    right = [torch.equal(row, wanted[:-1]) for source, target in pairs for row, wanted in zip(model.decode(source), target, strict=True)]
    return sum(right) / len(right)


TASK = SequenceTask("Writing backwards, from sequence to sequence", "sequences of letters backwards", lambda source: source.flip(1))
SORT = SequenceTask("Sorting, from sequence to sequence", "the letters of a sequence in their order", lambda source: source.sort(1).values)
