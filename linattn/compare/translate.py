"""Task of translation by characters, of the Debian handbook's English into Chinese or of any file of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.compare.sequences import decoders, roles, target_loss, written_per_second
from linattn.compare.tasks import Recipe
from linattn.data.packed import permuted
from linattn.data.pairs import Pairs, handbook, read_pairs
from linattn.experiment.study import Column
from linattn.models import Seq2SeqConfig, Seq2SeqModel
from linattn.report.words import figure

LONGEST = 96  # characters of a source and of a target: longer pairs are skipped
TEST = 20  # every twentieth pair, in a shuffled order, is for the test
ASKED = 256  # largest number of test pairs
UNKNOWN = 1  # character that is not in the training data; 0 is padding and the end


class TranslateTask:
    """Short sentences; a token is a character."""

    title = "Translating, character by character"
    question = (
        "Small encoder-decoders of equal size learn to translate short sentences. They are judged by the bits per character of test "
        "translations, given the source and the characters before."
    )
    full = Recipe(mixers=("softmax", "cosformer", "linear_transformer"), steps=1500, dim=128, layers=2, batch_size=32, learning_rate=2e-3)
    quick = Recipe(mixers=("softmax", "cosformer"), steps=20, dim=32, layers=1, batch_size=16, learning_rate=3e-3, seeds=1)
    figures = (
        Column("bits", "bits per character", "{:.3f}".format, spread=True, lower_is_better=True),
        Column("tokens_per_second", "characters written/s", figure, spread=True),
    )

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on(self, path: Path) -> TranslateTask:
        return TranslateTask(path)

    @cached_property
    def data(self) -> Split:
        """The pairs, split."""
        with torch.device("cpu"):
            return Split(handbook() if self.path is None else read_pairs(self.path))

    def facts(self) -> dict[str, Any]:
        data = self.data
        counts = {"pairs learned from": len(data.train), "pairs tested": len(data.test)}
        notes = {"notes": [f"{self.path}: {told}"]} if (told := data.read.told()) else {}
        name = "the Debian handbook in English and Chinese" if self.path is None else self.path.name
        return {"name": name, "sha256": data.read.sha256, **counts, "characters of the target": len(data.target), **notes}

    def mixers(self) -> list[str]:
        return decoders()

    def model(self, mixer: str, recipe: Recipe, ffn_dim: int | None) -> Seq2SeqModel:
        data = self.data
        config = Seq2SeqConfig(
            source_vocab=len(data.source) + 2, target_vocab=len(data.target) + 2, length=LONGEST + 1, dim=recipe.dim, layers=recipe.layers,
            ffn_dim=ffn_dim, ratio=data.ratio, dropout=0.1, **roles(mixer),
        )  # fmt: skip
        return Seq2SeqModel(config)

    def batches(self, recipe: Recipe, seed: int) -> Iterator[list[tuple[str, str]]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(len(self.data.train), (recipe.batch_size,), generator=generator).tolist()
            yield [self.data.train[i] for i in chosen]

    def loss(self, model: nn.Module, batch: list[tuple[str, str]]) -> Tensor:
        return target_loss(cast(Seq2SeqModel, model), *self.data.tensors(batch))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        total, count = 0.0, 0
        for start in range(0, len(self.data.test), 32):
            batch = self.data.tensors(self.data.test[start : start + 32])
            here = int(batch[-1].sum())
            total, count = total + here * target_loss(cast(Seq2SeqModel, model), *batch).item(), count + here
        return {"bits": total / count / torch.log(torch.tensor(2.0)).item()}

    def measure(self, model: nn.Module) -> dict[str, float]:
        source, mask, *_ = self.data.tensors(self.data.test[:16])
        return {"tokens_per_second": written_per_second(cast(Seq2SeqModel, model), source, mask, 1)}


class Split:
    """Short pairs for training and test, and the characters of both languages in the training data."""

    def __init__(self, read: Pairs) -> None:
        self.read = read
        short = [pair for pair in read.pairs if max(map(len, pair)) <= LONGEST]
        order = [permuted(i, len(short), key=0) for i in range(len(short))]
        self.test = [short[n] for i, n in enumerate(order) if i % TEST == 0][:ASKED]
        self.train = [short[n] for i, n in enumerate(order) if i % TEST]
        if not self.train:
            raise ValueError(f"at least 2 pairs of at most {LONGEST} characters are needed, but {len(short)} of {len(read.pairs):,} are")
        self.source, self.target = ({c: n for n, c in enumerate(sorted({c for pair in self.train for c in pair[i]}), 2)} for i in (0, 1))
        self.ratio = sum(len(target) for _, target in self.train) / sum(len(source) for source, _ in self.train)

    def tensors(self, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sources [B, Ts] with their mask; targets [B, Tt], including the end, with their mask."""
        source, mask = _numbers([[self.source.get(c, UNKNOWN) for c in s] for s, _ in pairs])
        return source, mask, *_numbers([[*(self.target.get(c, UNKNOWN) for c in t), 0] for _, t in pairs])

    def text(self, row: Tensor) -> str:
        """The text of a target's tokens."""
        characters = {n: c for c, n in self.target.items()}
        return "".join(characters.get(n, "\ufffd") for n in row.tolist())


def _numbers(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    padded = torch.stack([F.pad(torch.tensor(row), (0, width - len(row))) for row in rows])
    return padded, torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


TASK = TranslateTask()
