"""Masked tokens are filled in by the schedule, highest confidence first, and given ones are kept."""

import math

import pytest
import torch

from linattn.generate import Sampling
from linattn.generate.masked import fill, schedule

MASK = 9
GREEDY = Sampling(temperature=0)


def test_schedule():
    assert schedule(256, 8) == [math.floor(256 * math.cos(math.pi * t / 16)) for t in range(1, 8)] + [0]
    assert schedule(3, 8) == [2, 1, 0, 0, 0, 0, 0, 0], "one fewer at least"
    assert schedule(5, 1) == [0]


class Sure:
    """Predicts the token t % 7 at place t, with confidence rising in t; records its inputs."""

    def __init__(self):
        self.seen = []

    def __call__(self, ids):
        self.seen.append(ids.clone())
        place = torch.arange(ids.shape[1])
        return torch.zeros(*ids.shape, 10).scatter(2, (place % 7).expand_as(ids)[..., None], (1.0 + place).expand_as(ids)[..., None])


def test_the_surest_come_first():
    model, ids = Sure(), torch.full((2, 20), 8)
    masked = torch.ones(2, 20, dtype=torch.bool)
    masked[:, 15:] = False
    y = fill(model, ids, masked, mask_id=MASK, steps=4, sampling=GREEDY, noise=0.0)
    assert torch.equal(y[:, :15], (torch.arange(15) % 7).expand(2, -1)) and (y[:, 15:] == 8).all()
    assert len(model.seen) == 4
    for shown, left in zip(model.seen, [15, *schedule(15, 4)], strict=False):
        assert (shown[:, :left] == MASK).all() and not (shown[:, left:] == MASK).any()


def test_chance():
    """Equal generators give equal tokens; a single step draws every token from the model's distribution."""
    p = torch.tensor([0.5, 0.3, 0.2])
    model = lambda ids: p.log().expand(*ids.shape, 3)  # noqa: E731
    ids, masked = torch.zeros(1, 4000, dtype=torch.int64), torch.ones(1, 4000, dtype=torch.bool)
    first, again = (fill(model, ids, masked, mask_id=3, steps=1, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(first, again)
    assert (first[0].bincount(minlength=3) / 4000 - p).abs().max() < 0.03


def test_refused():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="as many masked tokens in each row"):
        fill(Sure(), ids, torch.tensor([[True, False, False], [True, True, False]]), mask_id=MASK)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        fill(Sure(), ids, torch.ones(2, 3, dtype=torch.bool), mask_id=MASK, steps=0)
