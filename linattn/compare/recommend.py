"""Task of next-item recommendation from the histories of users, for models with any causal mixer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import mixers
from linattn.compare.tasks import Recipe
from linattn.data.interactions import Chain, Interactions, markov_interactions, read_interactions
from linattn.experiment.study import Column
from linattn.models import RecommendConfig, RecommendModel
from linattn.models.recommend import padded
from linattn.models.stack import sequence_misfit
from linattn.report.words import figure, percent

AT = 10  # ranks that count as hits
LENGTH = 50  # items of a history that a model reads, the latest ones
LEAST = 3  # items of a history with a test item: one for training, one for validation, one for the test
REPEATS = 3  # repetitions of the measured pass
DROPOUT = 0.2  # against memorisation of small logs
_OURS = ("linrec", "softmax", "gla")


class RecommendTask:
    """Leave one out: the last item of each history is for the test, the one before for validation, the others are for training."""

    title = "What comes next, by causal mixers"
    question = (
        "Small models of equal size read the histories of users and rank all items by their probability of being next. "
        "The last item of each history is the test item. HR@10 is the share of users for whom it is among the first ten, and NDCG@10 "
        "weighs it by 1 / log2(1 + rank)."
    )
    full = Recipe(mixers=_OURS, steps=600, dim=64, layers=2, batch_size=128, learning_rate=3e-3)
    quick = Recipe(mixers=_OURS, steps=30, dim=32, layers=1, batch_size=64, learning_rate=3e-3, seeds=1)
    figures = (
        Column("hr", "HR@10", percent, spread=True),
        Column("ndcg", "NDCG@10", "{:.4f}".format, spread=True),
        Column("users_per_second", "users/s", figure, spread=True),
    )

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on(self, path: Path) -> RecommendTask:
        return RecommendTask(path)

    @cached_property
    def data(self) -> Split:
        """The log, split."""
        with torch.device("cpu"):  # the first access may be under the meta device, while a model is sized
            return self._split()

    def _split(self) -> Split:
        return Split(*markov_interactions()) if self.path is None else Split(read_interactions(self.path))

    def facts(self) -> dict[str, Any]:
        data, log = self.data, self.data.log
        taken = sum(map(len, log.histories))
        name = "histories drawn from a Markov chain of second order" if self.path is None else self.path.name
        counts = {"users": len(log.histories), "items": len(log.items), "interactions": taken, "users tested": len(data.asked)}
        notes = {"notes": [f"{self.path}: {told}"]} if (told := log.told()) else {}
        rows = {"rows left out": log.bad} if log.bad else {}
        return {"name": name, "sha256": log.sha256, **counts, **rows, **notes, "references": data.references()}

    def mixers(self) -> list[str]:
        misfit = sequence_misfit(causal=True)
        return [name for name in mixers.available() if misfit(mixers.info(name)) is None]

    def model(self, mixer: str, recipe: Recipe, ffn_dim: int | None) -> RecommendModel:
        config = RecommendConfig(
            items=len(self.data.log.items), length=LENGTH, dim=recipe.dim, layers=recipe.layers, mixer=mixer, ffn_dim=ffn_dim,
            dropout=DROPOUT,
        )  # fmt: skip
        return RecommendModel(config)

    def batches(self, recipe: Recipe, seed: int) -> Iterator[list[Tensor]]:
        """Batches of parts of the training histories."""
        generator, learned = torch.Generator().manual_seed(seed), self.data.learned
        while True:
            chosen = torch.randint(len(learned), (recipe.batch_size,), generator=generator).tolist()
            yield [_stretch(learned[i], generator) for i in chosen]

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return next_item_loss(cast(RecommendModel, model), batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        ranked = [ranks(cast(RecommendModel, model), part, wanted) for part, wanted in self.data.parts()]
        return figures_of(torch.cat(ranked))

    def measure(self, model: nn.Module) -> dict[str, float]:
        taken = []
        for _ in range(REPEATS + 1):
            begin = time.perf_counter()
            self.evaluate(model)
            taken.append(time.perf_counter() - begin)
        return {"users_per_second": len(self.data.asked) / statistics.median(taken[1:])}  # the first is warm-up


class Split:
    """A log split for leave-one-out: training histories, test histories and items, and reference figures."""

    def __init__(self, log: Interactions, chain: Chain | None = None) -> None:
        self.log, self._chain = log, chain
        histories = log.histories
        self.asked = [history[:-1] for history in histories if len(history) >= LEAST]
        self.wanted = torch.tensor([int(history[-1]) for history in histories if len(history) >= LEAST])
        self.learned = [kept for history in histories if len(kept := history[:-2] if len(history) >= LEAST else history) >= 2]
        if not self.asked or not self.learned:
            raise ValueError(
                f"a log must have users with at least {LEAST} interactions, whose last one is the test, and others to train on; "
                f"the longest of its {len(histories):,} histories has {max(map(len, histories))}"
            )

    def parts(self, size: int = 512) -> Iterator[tuple[list[Tensor], Tensor]]:
        """Batches of test histories and their next items, ``size`` at a time."""
        for start in range(0, len(self.asked), size):
            yield self.asked[start : start + size], self.wanted[start : start + size]

    @cache  # noqa: B019  (one split lives as long as its task)
    def references(self) -> dict[str, dict[str, float]]:
        """Figures of ranking by popularity and, if the probabilities are known, of the best possible ranking."""
        counts = torch.bincount(torch.cat(self.learned), minlength=len(self.log.items)).double()
        popular = figures_of(rank(counts.expand(len(self.wanted), -1), self.wanted))
        if self._chain is None:
            return {"by popularity": popular}
        chances = self._chain.chances(torch.stack([history[-2:] for history in self.asked]))
        best = chances.topk(min(AT, chances.shape[1])).values
        gains = 1 / torch.arange(2.0, best.shape[1] + 2, dtype=torch.float64).log2()
        return {
            "best that is possible": {"hr": best.sum(1).mean().item(), "ndcg": (best * gains).sum(1).mean().item()},
            "by popularity": popular,
        }


def _stretch(history: Tensor, generator: torch.Generator) -> Tensor:
    """Take at most LENGTH + 1 items of ``history``, from a random place."""
    spare = len(history) - LENGTH - 1
    start = int(torch.randint(spare + 1, (), generator=generator)) if spare > 0 else 0
    return history[start : start + LENGTH + 1]


def next_item_loss(model: RecommendModel, histories: list[Tensor]) -> Tensor:
    """Cross entropy of the next item over all items: after each of ``histories`` where the model is causal, else at a place in each.

    Histories of bidirectional models are cut before the item to predict, since every item sees all others.
    """
    if not model.config.causal:
        cuts = [int(torch.randint(1, len(history), ())) for history in histories]
        items, mask = padded([history[:cut] for history, cut in zip(histories, cuts, strict=True)], model.config.length)
        wanted = torch.stack([history[cut] for history, cut in zip(histories, cuts, strict=True)])
        ends = mask.sum(1) - 1
        return F.cross_entropy(model(items, mask)[torch.arange(len(ends)), ends], wanted)
    items, mask = padded([history[:-1] for history in histories], model.config.length)
    wanted, _ = padded([history[1:] for history in histories], model.config.length)
    return F.cross_entropy(model(items, mask)[mask], wanted[mask])


def ranks(model: RecommendModel, histories: list[Tensor], wanted: Tensor) -> Tensor:
    """The rank, from 1, of ``wanted`` [B] among all items after each of ``histories``."""
    items, mask = padded(histories, model.config.length)
    ends = model.hidden(items, mask)[torch.arange(len(items)), mask.sum(1) - 1]
    return rank(ends @ model.embedding.weight.T, wanted)


def rank(scores: Tensor, wanted: Tensor) -> Tensor:
    """Rank, from 1, of items ``wanted`` [B] by ``scores`` [B, items]; pessimistic for ties, with NaN last."""
    return scores.shape[1] - (scores < scores.gather(1, wanted[:, None])).sum(1)


def figures_of(ranks: Tensor) -> dict[str, float]:
    """HR@10 and NDCG@10 of ranks [B] from 1, with one relevant item each."""
    found = ranks <= AT
    gains = torch.where(found, 1 / (ranks.double() + 1).log2(), 0.0)
    return {"hr": found.double().mean().item(), "ndcg": gains.mean().item()}


TASK = RecommendTask()
