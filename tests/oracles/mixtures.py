"""Shared by tests of mixtures of experts: the definition token by token, weights with uneven routing, comparisons."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn import ffn
from linattn.ffn.mixture import Routed
from tests.oracles.compare import distance


def uneven(name: str, **options) -> Routed:
    """A mixture of width 16 in float64 with sharp, uneven routing."""
    torch.manual_seed(0)
    m = ffn.create(name, 16, 24, **options).double()
    nn.init.normal_(m.router.weight, std=0.7)
    return m


def loop(m: Routed, x: Tensor, capacity: int) -> tuple[Tensor, int]:
    """The mixture on x [G, S, D], token by token and choice by choice, and the number of dropped tokens."""
    groups, dropped = [], 0
    for tokens in x:
        scores = (tokens @ m.router.weight.T).softmax(-1)
        order = scores.detach().argsort(-1, descending=True)[:, : m.active]
        taken, served = [0] * m.count, [False] * len(tokens)
        y = [torch.zeros_like(t) for t in tokens]
        for choice in range(m.active):
            for t, token in enumerate(tokens):
                e = int(order[t, choice])
                if taken[e] == capacity:
                    continue
                taken[e] += 1
                served[t] = True
                gate = scores[t, e] if m.active == 1 else scores[t, e] / sum(scores[t, other] for other in order[t])
                y[t] = y[t] + gate * m.one(e, token[None])[0]
        groups.append(torch.stack(y))
        dropped += served.count(False)
    return torch.stack(groups), dropped


def loss(m: Routed, x: Tensor) -> dict[str, Tensor]:
    """The weighed losses, from their definitions."""
    logits = x @ m.router.weight.T
    scores = logits.softmax(-1)
    first = scores.argmax(-1)
    share = torch.stack([(first == e).double().mean(1) for e in range(m.count)], -1)  # [G, count]
    return {
        "balance": m.balance * m.count * (share * scores.mean(1)).sum(1).mean(),
        "z": m.z * logits.exp().sum(-1).log().square().mean(),
    }


def assert_same(ours: list[Tensor], theirs: list[Tensor], leaves: tuple[list[Tensor], list[Tensor]], tolerance: float = 1e-12) -> None:
    """Values, and gradients of the sum of their squares with respect to either side's leaves."""
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a, b) < tolerance
    found = [
        torch.autograd.grad(sum(t.square().sum() for t in values), own, materialize_grads=True)
        for values, own in zip((ours, theirs), leaves, strict=True)
    ]
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and distance(a, b) < tolerance


def assert_loop(m: Routed, x: Tensor, capacity: int) -> None:
    """Compare values, losses, dropped tokens and gradients with the definition; ``capacity`` applies in training."""
    x = x.requires_grad_()
    with ffn.reports() as told:
        y = m(x)
    wanted, dropped = loop(m, x, capacity)
    (report,) = told
    assert report.counts["tokens"] == x[..., 0].numel() and report.counts["dropped"] == dropped
    losses = loss(m, x)
    assert set(report.losses) == {name for name in losses if getattr(m, name)}
    leaves = [x, *m.parameters()]
    assert_same([y, *report.losses.values()], [wanted, *(losses[name] for name in report.losses)], (leaves, leaves), 1e-11)
