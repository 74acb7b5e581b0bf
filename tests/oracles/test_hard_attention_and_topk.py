"""Hard and top-k attention as limits of softmax attention, from both ends, and against x-transformers on the same q, k and v."""

from dataclasses import replace

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.oracles import wheels
from tests.oracles.compare import distance


def made(name, like=None, **options):
    torch.manual_seed(0)
    mixer = create(name, dim=32, heads=2, **options).double()
    if like is not None:
        mixer.load_state_dict(like.state_dict())
    return mixer


def tokens(length=40):
    return torch.randn(2, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("causal", [True, False])
def test_hard_attention_is_the_limit_of_larger_scores(causal):
    """Softmax of β times the scores converges as exp(-β gap), with the gap between the two best, to equal bits."""
    x, hard = tokens(), made("hard_attention", causal=causal)
    errors = []
    for beta in (1e2, 1e4, 1e6, 1e8):
        soft = made("softmax", hard, causal=causal)
        with torch.no_grad():
            soft.q_proj.weight.mul_(beta)
        errors.append(distance(soft(x), hard(x)))
    assert errors == sorted(errors, reverse=True) and errors[0] > 1e-2 and errors[-1] < 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_topk_lies_between(causal):
    """k = 1: hard attention. All tokens: softmax, with gradients. The distance from softmax falls with k."""
    x, soft = tokens(), made("softmax", causal=causal)
    hard = made("hard_attention", soft, causal=causal)
    one, every = (made("topk", soft, k=k, causal=causal) for k in (1, 40))
    assert distance(one(x), hard(x)) < 1e-12 and distance(every(x), soft(x)) < 1e-12
    got, wanted = (torch.autograd.grad(m(x).square().sum(), [x, *m.parameters()]) for m in (every, soft))
    assert all(distance(a, b) < 1e-11 for a, b in zip(got, wanted, strict=True))
    errors = [distance(made("topk", soft, k=k, causal=causal)(x), soft(x)) for k in (1, 2, 4, 8, 16, 32)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 5


def test_ties():
    """Ties: hard attention is their mean, the limit of softmax, and top-k includes all ties with the k-th."""
    x = tokens(1).detach()[:1].expand(-1, 4, -1)
    for name, options in (("hard_attention", {}), ("topk", {"k": 2})):
        mixer = made(name, rotary=False, **options)
        weights = mixer.attend(*recurrence(mixer, x, torch.eye(4, dtype=torch.float64)[None, :, None].expand(1, -1, 2, -1)))
        assert torch.equal(weights[0, 3, 0], torch.full((4,), 0.25, dtype=torch.float64))


def recurrence(mixer, x, v):
    call = CallContext(x, returning=False)
    return replace(mixer.recurrence(x, call), v=v), call


@pytest.mark.parametrize(("name", "options", "theirs"), [
    ("hard_attention", {}, {"hard": True}), ("topk", {"k": 5}, {"sparse_topk": 5}), ("topk", {"k": 2}, {"sparse_topk": 2}),
])  # fmt: skip
@pytest.mark.parametrize("causal", [True, False])
def test_wheel(name, options, theirs, causal):
    """With gradients: straight-through for hard attention on both sides."""
    attend = wheels.module("x-transformers==2.31.10", "x_transformers/attend.py").Attend(causal=causal, heads=2, **theirs)
    mixer, x = made(name, causal=causal, **options), tokens()
    r = mixer.recurrence(x, CallContext(x, returning=False))
    q, k, v = (t.transpose(1, 2) for t in (r.q, r.k, r.v))
    wanted = mixer.read(attend(q, k, v)[0].transpose(1, 2), x)
    y = mixer(x)
    assert distance(y, wanted) < 1e-12
    got, expected = (torch.autograd.grad(t.square().sum(), [x, *mixer.parameters()]) for t in (y, wanted))
    assert all(distance(a, b) < 1e-11 for a, b in zip(got, expected, strict=True))


def test_refused():
    with pytest.raises(ValueError, match="k must be at least 1 token, but came as 0"):
        create("topk", dim=32, k=0)
