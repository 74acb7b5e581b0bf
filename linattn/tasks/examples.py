"""Examples of the tasks, and the draws that several of them need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from linattn.arguments import beyond_memory

LARGEST = 2**31 - 1  # limit of all numbers
IGNORED = -100  # label of a position without a question; torch's cross entropy ignores it


@dataclass(frozen=True)
class Examples:
    """Sequences with labels at the positions that ask for an answer.

    Args:
        ids: tokens [N, T] int64.
        labels: [N, T] int64: the wanted output at each position, :data:`IGNORED` at positions without a question.
        vocab_size: number of tokens; ids and labels are below it.
    """

    ids: Tensor
    labels: Tensor
    vocab_size: int

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: str | torch.device) -> Examples:
        """Move the examples to ``device``."""
        return Examples(self.ids.to(device), self.labels.to(device), self.vocab_size)

    def asked(self) -> tuple[Tensor, Tensor]:
        """Positions and answers of the questions, both [N, n] int64, with n the largest number of questions of an example.

        Examples with fewer questions are padded with the answer :data:`IGNORED`.
        """
        question = self.labels != IGNORED
        most = int(question.sum(1).max()) if len(self) else 0
        places = torch.argsort(~question, dim=1, stable=True)[:, :most]
        return places, self.labels.gather(1, places)


def whole(count: int, *, least: int = 0, **numbers: int) -> None:
    """Raise ValueError for a ``count`` below 0, any of ``numbers`` below ``least``, and one beyond :data:`LARGEST`."""
    for name, value, bound in (("count", count, 0), *((n, v, least) for n, v in numbers.items())):
        if isinstance(value, bool) or not isinstance(value, int) or value < bound:
            raise ValueError(f"{name} must be an integer of at least {bound}, but came as {value!r}")
        if value > LARGEST:
            raise ValueError(f"{name} must be an integer of at most {LARGEST}, but came as {value!r}")


def integers(low: int, high: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw uniformly from low, ..., high - 1; every task calls this first, so ``generator`` is checked here."""
    if not isinstance(generator, Generator) or generator.device.type != "cpu":
        came = getattr(generator, "device", type(generator).__name__)
        raise TypeError(f"generator must be a torch.Generator of the CPU, whose draws are the same everywhere, but came as {came}")
    try:
        return torch.randint(low, high, shape, generator=generator)
    except RuntimeError as error:
        if not beyond_memory(error):
            raise
        raise ValueError(f"count must be lower, or the examples shorter: {list(shape)} tokens do not fit into memory") from None


def distinct(count: int, size: int, most: int, generator: Generator) -> Tensor:
    """Draw ``size`` different integers below ``most`` in each of ``count`` rows, every order equally likely: [count, size].

    By Floyd's method: number i is drawn from 0 to j = most - size + i, and replaced by j if it was drawn before.
    """
    chosen = torch.empty(count, size, dtype=torch.int64)
    for i in range(size):
        j = most - size + i
        drawn = integers(0, j + 1, (count,), generator)
        taken = (chosen[:, :i] == drawn[:, None]).any(1)
        chosen[:, i] = torch.where(taken, j, drawn)
    order = torch.rand(count, size, generator=generator, dtype=torch.float64).argsort(1)
    return chosen.gather(1, order)


def weighted(count: int, size: int, weights: Tensor, generator: Generator) -> Tensor:
    """Draw ``size`` different indices of ``weights`` [n] in each row, in proportion to the weights left: [count, size].

    Sorting log w plus Gumbel noise gives that distribution at once.
    """
    uniform = torch.rand(count, len(weights), generator=generator, dtype=torch.float64).clamp_min(torch.finfo(torch.float64).tiny)
    return (weights.double().log() - (-uniform.log()).log()).topk(size, 1).indices
