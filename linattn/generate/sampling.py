"""Sampling of the next token: greedy, temperature, top-k, top-p."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.arguments import check_fields, described, known_device
from linattn.ops.checks import tensor

LIKELY = 1024  # tokens that are sorted at first on a CPU


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, applied in this order: divide the logits by the temperature, keep the top k, then the top p.

    Args:
        temperature: 0 takes the most likely token.
        top_k: number of most likely tokens that are kept; None: all.
        top_p: the most likely tokens are kept until their probabilities sum to this, at least one; None: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not (0 <= self.temperature < math.inf):
            raise ValueError(f"temperature must be 0 (greedy) or a finite positive number, but came as {self.temperature!r}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be an integer of at least 1, but came as {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, but came as {self.top_p!r}")


def generator(seed: int | None, device: str | torch.device = "cpu") -> torch.Generator:
    """Make a generator on ``device`` seeded with ``seed``; None: a random seed."""
    place = known_device("device", device)
    try:
        made = torch.Generator(place)
    except (RuntimeError, AssertionError):
        raise ValueError(f"device {device!r} is not available on this machine") from None
    if seed is None:
        made.seed()
        return made
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be from 0 to 2**64 - 1, but came as {seed!r}")
    return made.manual_seed(seed)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Turn logits [B, V] into float32 probabilities [B, V]; ``sampling.temperature`` must be above 0."""
    _check(logits, sampling)
    if sampling.temperature == 0:
        raise ValueError("sampling must have a temperature above 0 here: at 0 the most likely token is chosen, without probabilities")
    return _probabilities(logits, sampling)


def _probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    return _kept(logits.float() / float(sampling.temperature), sampling.top_k, sampling.top_p)


def _kept(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Probabilities of the tokens that are kept, from logits [B, V] over the temperature."""
    size, order = logits.shape, None
    if top_k is not None and top_k < size[-1]:
        logits, order = logits.topk(top_k)  # most likely first
    p = logits.softmax(-1)
    if top_p is not None:
        if order is None:
            p, order = _descending(p, top_p)
        p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)  # kept if the tokens before it do not reach top_p
    if order is not None:
        p = p.new_zeros(size).scatter(-1, order, p)
    return p if top_p is None else p / p.sum(-1, keepdim=True)


def _descending(p: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """The largest of ``p`` [B, V] in order, the first of equal ones first, as many as a sum of ``mass`` needs or more, and their places.

    A CPU sorts a few of them: all 32,000 take it as long as a decoding step.
    """
    if not p.is_cuda and p.shape[-1] > 4 * LIKELY:
        places = p.topk(LIKELY).indices.sort(-1).values
        largest, order = p.gather(-1, places).sort(descending=True, stable=True)
        whole = largest > largest[..., -1:]  # others may have equal ones among the rest
        if bool((whole & (largest.cumsum(-1) >= mass)).any(-1).all()):
            return largest, places.gather(-1, order)
    return p.sort(descending=True, stable=True)


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
    """Draw tokens [B] int64 from logits [B, V]."""
    _check(logits, sampling)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, but came as {described(generator)}")
    if sampling.temperature == 0:
        return greedy(logits)
    return draw(_probabilities(logits, sampling), generator)


def greedy(logits: Tensor) -> Tensor:
    """Most likely tokens [...] int64 of ``logits`` [..., V], the first ones of equal ones."""
    return logits.argmax(-1) if logits.is_cuda else logits.max(-1).indices  # in bfloat16 argmax takes four times as long on a CPU


def sample_rows(logits: Tensor, rows: Sequence[tuple[Sampling, torch.Generator]], out: Tensor) -> None:
    """Draw a token for each row of logits [n, V] by its own sampling and generator, into ``out`` [n]; greedy rows are left unchanged.

    Every row gets the token that :func:`sample` draws for it alone. Rows of equal top-k and top-p are drawn together.
    """
    alike: dict[tuple[int | None, float | None], list[int]] = {}
    for i, (sampling, _) in enumerate(rows):
        if sampling.temperature:
            alike.setdefault((sampling.top_k, sampling.top_p), []).append(i)
    for (top_k, top_p), places in alike.items():
        index = torch.tensor(places).to(logits.device, non_blocking=True)
        temperatures = torch.tensor([float(rows[i][0].temperature) for i in places]).to(logits.device, non_blocking=True)
        p = _kept(logits[index].float() / temperatures[:, None], top_k, top_p)
        noise = torch.empty_like(p)
        for row, i in zip(noise, places, strict=True):
            row.exponential_(1, generator=rows[i][1])
        out[index] = (p / noise).argmax(-1)


def _check(logits: Tensor, sampling: Sampling) -> None:
    if not tensor("logits", logits).is_floating_point() or logits.ndim < 1 or not logits.shape[-1]:
        raise ValueError(f"logits must be numbers [B, V] with V of at least 1, but came as {described(logits)}")
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, but came as {described(sampling)}")


def draw(p: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw tokens [B] int64 from probabilities [B, V], as ``torch.multinomial`` does but without a synchronisation."""
    return drawn(p, torch.empty_like(p).exponential_(1, generator=generator))


def drawn(p: Tensor, noise: Tensor) -> Tensor:
    """Draw tokens [B] int64 from probabilities [B, V] by ``noise`` [B, V] of the exponential distribution: equal noise, equal tokens."""
    return (p / noise).argmax(-1)
