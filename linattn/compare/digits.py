"""Task of handwritten digits, for image models with any bidirectional mixer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn import mixers
from linattn.compare.tasks import Recipe
from linattn.data.digits import CLASSES, SIZE, digits, shifted
from linattn.experiment.study import Column
from linattn.models import ImageConfig, ImageModel
from linattn.report.words import figure, percent

PATCH, SHIFT = 2, 1  # pixels: side of a token, and largest shift of a training image
REPEATS = 5  # repetitions of the measured pass
TOKENS = (SIZE // PATCH) ** 2
OPTIONS = {  # the default 49 agents and 128 slots exceed the 16 tokens
    "agent": {"agents": 4},
    "linformer": {"length": TOKENS, "slots": TOKENS // 2},
}
_OURS = ("focused", "agent", "mobile", "efficientvit", "slab")


class DigitsTask:
    """UCI's handwritten digits, 8 x 8 pixels, as 4 x 4 overlapping tokens; every fifth image is a test image."""

    title = "Handwritten digits by mixers that read both ways"
    question = (
        "Small image models of equal size learn to classify handwritten digits. They are judged by the share of test images that they "
        "classify correctly."
    )
    full = Recipe(mixers=_OURS, steps=900, dim=64, layers=2, batch_size=64, learning_rate=6e-3)
    quick = Recipe(mixers=_OURS, steps=20, dim=32, layers=1, batch_size=64, learning_rate=3e-3, seeds=1)
    figures = (
        Column("accuracy", "test accuracy", percent, spread=True),
        Column("images_per_second", "images/s", figure, spread=True),
    )

    def facts(self) -> dict[str, Any]:
        data = digits()
        counts = {"train": len(data.train), "test": len(data.test)}
        return {"name": "handwritten digits of UCI, as they come with scikit-learn", "sha256": data.sha256, **counts}

    def mixers(self) -> list[str]:
        known = [mixers.info(name) for name in mixers.available()]
        return [m.name for m in known if m.kind == "grid" or m.bidirectional]

    def model(self, mixer: str, recipe: Recipe, ffn_dim: int | None) -> ImageModel:
        own = {mixer: OPTIONS[mixer]} if mixer in OPTIONS else {}
        config = ImageConfig(
            image_size=(SIZE, SIZE), patch_size=PATCH, overlap=True, classes=CLASSES, dim=recipe.dim, layers=recipe.layers, mixer=mixer,
            mixer_options=own, ffn_dim=ffn_dim,
        )  # fmt: skip
        return ImageModel(config)

    def batches(self, recipe: Recipe, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        data, generator = digits(), torch.Generator().manual_seed(seed)
        order = torch.empty(0, dtype=torch.int64)
        while True:
            while len(order) < recipe.batch_size:
                order = torch.cat([order, torch.randperm(len(data.train), generator=generator)])
            now, order = order[: recipe.batch_size], order[recipe.batch_size :]
            yield shifted(data.train[now], SHIFT, generator), data.train_labels[now]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        data = digits()
        return {"accuracy": (model(data.test).argmax(-1) == data.test_labels).double().mean().item()}

    def measure(self, model: nn.Module) -> dict[str, float]:
        images, taken = digits().test, []
        for _ in range(REPEATS + 1):
            begin = time.perf_counter()
            model(images)
            taken.append(time.perf_counter() - begin)
        return {"images_per_second": len(images) / statistics.median(taken[1:])}  # the first is warm-up


TASK = DigitsTask()
