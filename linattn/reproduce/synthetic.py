"""Small models for synthetic tasks (:mod:`linattn.tasks`); the head is only applied at questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.experiment.trainer import Batches, Optimization, Trainer
from linattn.models import LanguageModel, LMConfig
from linattn.reproduce import variants
from linattn.tasks import IGNORED, Examples

TOGETHER = (1 << 16, 1 << 20)  # tokens of an evaluation batch, on a CPU and on a GPU


@dataclass(frozen=True)
class Recipe:
    """Recipe of a training by :mod:`linattn.experiment.trainer`: warm-up over a twentieth of the steps, then a cosine to 0.

    Args:
        epochs: passes over the examples.
        batch_size: examples of a step.
        learning_rate: its peak.
        weight_decay: of matrices; not of norms, biases and time constants.
        enough: training stops after an epoch with a mean loss below this.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.1
    enough: float = 0.0


class Asked(nn.Module):
    """Language model that computes logits only at given positions."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.language = LanguageModel(config)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Logits [N, n, vocab] at ``places`` [N, n] of ``ids`` [N, T]."""
        hidden, _ = self.language.model(ids)
        return self.language.lm_head(hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1])))


class Decoder(Asked):
    """Decoder for :func:`linattn.tasks.compression`: two layers that predict the token at a position from the last output.
    As in the paper's autoencoder (arXiv 2403.17844): positions are sinusoids, the layers keep the width.
    """

    def __init__(self, config: LMConfig, tokens: int) -> None:
        super().__init__(config)
        dim = config.dim
        self.layers = nn.Sequential(*(m for _ in range(2) for m in (nn.RMSNorm(dim), nn.Linear(dim, dim), nn.GELU())), nn.RMSNorm(dim))
        turn = torch.arange(tokens)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("position", torch.cat([turn.sin(), turn.cos()], 1), persistent=False)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Logits [N, n, vocab] for ``places`` [N, n], from the output after the last of ``ids`` [N, T]."""
        hidden, _ = self.language.model(ids)
        return self.language.lm_head(self.layers(hidden[:, -1:] + cast(Tensor, self.position)[places]))


def build(mixer: str, seed: int, *, before: str = "", tokens: int | None = None, **fields: Any) -> Asked:
    """Build a model of the variant ``mixer``, deterministic in ``seed``.

    Args:
        mixer: see :mod:`linattn.reproduce.variants`.
        seed: of the weights.
        before: a mixer whose layers precede those of ``mixer``, alternating.
        tokens: for a :class:`Decoder`, the length of the examples.
        fields: of LMConfig.
    """
    variant = variants.parse(mixer)
    options = {variant.name: variant.options} if variant.options else {}
    config = LMConfig(mixer=f"{before}, {variant.name}" if before else variant.name, mixer_options=options, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Asked(config) if tokens is None else Decoder(config, tokens)


def device_of(model: nn.Module) -> torch.device:
    """Device of the parameters of ``model``."""
    return next(model.parameters()).device


def train(model: Asked, examples: Sequence[Examples], recipe: Recipe, *, seed: int = 0) -> Generator[None, None, float]:
    """Train ``model`` on ``examples``, parts of one length each; yields after every step.

    The order follows from ``seed``: batches of one length, all lengths mixed. An incomplete batch is dropped unless it is the only one.

    Returns:
        The mean loss of the last epoch.
    """
    device = device_of(model)
    parts = [Batches((e.ids, *e.asked()), recipe.batch_size, device) for e in examples]
    generator = torch.Generator().manual_seed(seed)
    steps = len(_order(parts, torch.Generator())) * recipe.epochs
    trainer = Trainer(model, _loss(model, device), Optimization(steps, recipe.learning_rate, recipe.weight_decay))
    loss = math.nan
    model.train()
    for _ in range(recipe.epochs):
        total = torch.zeros((), device=device)
        order = _order(parts, generator)
        for part, rows in order:
            total += trainer.replay(part, rows)
            yield
        loss = total.item() / max(len(order), 1)
        if loss < recipe.enough:
            break
    return loss


def finish(training: Generator[None, None, float]) -> float:
    """Run all steps of :func:`train`."""
    while True:
        try:
            next(training)
        except StopIteration as end:
            return end.value


@torch.inference_mode()
def right(model: Asked, examples: Examples, batch_size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """Correct answers and questions of each batch, both [n, questions] bool."""
    device = device_of(model)
    model.eval()
    places, answers = examples.asked()
    for ids, at, wanted in zip(*(t.split(batch_size) for t in (examples.ids, places, answers)), strict=True):
        with _low_precision(device):
            found = model(ids.to(device), at.to(device)).argmax(-1).cpu()
        yield found == wanted.cpu(), wanted.cpu() != IGNORED


def accuracy(model: Asked, examples: Examples, batch_size: int = 256) -> float:
    """Share of all questions that ``model`` answers correctly."""
    counts = [(int(good.sum()), int(asked.sum())) for good, asked in right(model, examples, batch_size)]
    return sum(g for g, _ in counts) / max(sum(a for _, a in counts), 1)


@torch.inference_mode()
def last_right(model: Asked, examples: Examples, segment: int) -> float:
    """Share of ``examples`` whose last answer is correct, read ``segment`` tokens at a time with the state carried over.

    A batch has about :data:`TOGETHER` tokens in a segment.
    """
    device, good = device_of(model), 0
    model.eval()
    rows = max(1, TOGETHER[device.type == "cuda"] // min(segment, examples.ids.shape[1]))
    for ids, labels in zip(examples.ids.split(rows), examples.labels[:, -1].split(rows), strict=True):
        state = None
        for piece in ids.split(segment, 1):
            with _low_precision(device):
                hidden, state = model.language.model(piece.to(device), state, return_state=True)
        with _low_precision(device):
            good += int((model.language.lm_head(hidden[:, -1]).argmax(-1).cpu() == labels.cpu()).sum())
    return good / len(examples)


@torch.inference_mode()
def state_bytes(model: Asked, tokens: int) -> int:
    """Bytes of the layers' states after ``tokens`` tokens of one sequence."""
    device = device_of(model)
    model.eval()
    with _low_precision(device):
        return model.language(torch.zeros(1, tokens, dtype=torch.int64, device=device), return_state=True)[1].nbytes


def _low_precision(device: torch.device) -> torch.autocast:
    """Autocast to bfloat16 on a GPU, without the cache of casts, which would be stale in a captured step."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def _loss(model: Asked, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The cross entropy of answers [N, n] at places [N, n] of ids [N, T]."""

    def loss(ids: Tensor, places: Tensor, answers: Tensor) -> Tensor:
        with _low_precision(device):
            logits = model(ids, places)
        return F.cross_entropy(logits.float().flatten(0, 1), answers.flatten(), ignore_index=IGNORED)

    return loss


def _order(parts: Sequence[Batches], generator: torch.Generator) -> list[tuple[Batches, Tensor]]:
    """Batches of an epoch, each of rows of one part."""
    batches: list[tuple[Batches, Tensor]] = []
    for part in parts:
        count = len(part.data[0]) // part.size
        rows = torch.randperm(len(part.data[0]), generator=generator)[: count * part.size].to(part.data[0].device, non_blocking=True)
        batches += [(part, r) for r in rows.split(part.size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
