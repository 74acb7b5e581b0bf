"""The small trainer: schedules by formula, steps against torch's optimizer, and rows loaded for captured steps."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from linattn.experiment.trainer import Batches, Optimization, Trainer, warmup_then_cosine, warmup_times_cosine


@pytest.mark.parametrize(
    ("schedule", "step", "share"),
    [
        (warmup_then_cosine, 0, 0.2),  # of 100 steps five warm up
        (warmup_then_cosine, 4, 1.0),
        (warmup_then_cosine, 5, 1.0),
        (warmup_then_cosine, 52, 0.5 * (1 + math.cos(math.pi * 47 / 95))),
        (warmup_then_cosine, 99, 0.5 * (1 + math.cos(math.pi * 94 / 95))),
        (warmup_times_cosine, 0, 0.2),
        (warmup_times_cosine, 4, 0.5 * (1 + math.cos(math.pi * 0.04))),
        (warmup_times_cosine, 50, 0.5),
    ],
)
def test_schedules(schedule, step, share):
    assert schedule(step, 100) == pytest.approx(share, abs=1e-15)


def test_the_shortest_training_has_a_rate():
    assert warmup_then_cosine(0, 1) == warmup_times_cosine(0, 1) == 1.0


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


@pytest.mark.parametrize("schedule", [warmup_then_cosine, warmup_times_cosine])
def test_steps_are_adamw_s(schedule):
    """Weight decay only for matrices, and clipped gradients."""
    model, reference = _model().double(), _model().double()
    x = torch.randn(5, 3, dtype=torch.float64)
    trainer = Trainer(model, lambda x: 30 * F.mse_loss(model(x), x.sum(1, keepdim=True)), Optimization(4, 1e-2, 0.5, schedule, fused=False))
    matrices, others = ([p for p in reference.parameters() if (p.ndim > 1) == kind] for kind in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95))
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * schedule(step, 4)
        optimizer.zero_grad()
        loss = 30 * F.mse_loss(reference(x), x.sum(1, keepdim=True))
        loss.backward()
        assert nn.utils.clip_grad_norm_(reference.parameters(), 1.0) > 1
        optimizer.step()
        assert trainer.step(x) == loss.detach()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_rows_are_loaded_and_learned_from():
    x = torch.randn(6, 3)
    one, two = _model(), _model()
    batches = Batches((x, x.sum(1, keepdim=True)), 4, torch.device("cpu"))
    assert batches.size == 4 and Batches((x,), 9, torch.device("cpu")).size == 6
    replayed, plain = (Trainer(m, lambda x, y, m=m: F.mse_loss(m(x), y), Optimization(2, 1e-2, 0.0)) for m in (one, two))
    for rows in (torch.tensor([5, 0, 1, 2]), torch.tensor([3, 3, 4, 0])):
        assert torch.equal(replayed.replay(batches, rows), plain.step(x[rows], x[rows].sum(1, keepdim=True)))
        assert torch.equal(batches.batch[0], x[rows])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
