"""LinRec against the paper's equations token by token, and against figures of the authors' layer."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.images import tokens, waved
from tests.oracles.similarity import assert_bidirectional, assert_forms, merged, projected

# Every hundredth of what the authors' MultiHeadAttention (commit 0a924d6) gives before its residual, and of the gradient of Σ y³.
VALUES = [-0.672765265284, -0.776056432066, -0.60915854932, 0.119367767925, 0.225328993543, 0.856465714666, 0.661676446662, 2.70902212352]
GRADIENTS = [-18.533341593, 6.76454060594, 5.50312020566, 37.7198549847, 16.9387008216, 58.6894605179, -7.54374788721, -13.2440392307]


def loop(mixer, x):
    """Token by token and pair by pair: a key is divided by its norm, or its channels by their norms over the visible tokens."""
    q, k, v = projected(mixer, x)
    q, k, n = F.elu(q), F.elu(k), x.shape[1]
    rows = []
    for t in range(n):
        seen = range(t + 1) if mixer.causal else range(n)
        column = sum(k[:, :, i] ** 2 for i in seen).sqrt()
        o = 0.0
        for i in seen:
            key = k[:, :, i] / (column if mixer.key_norm == "column" else (k[:, :, i] ** 2).sum(-1, keepdim=True).sqrt())
            o = o + (q[:, :, t] * key).sum(-1, keepdim=True) * v[:, :, i]
        rows.append(o / (q[:, :, t] ** 2).sum(-1, keepdim=True).sqrt() / q.shape[-1] ** 0.5)
    return merged(mixer, torch.stack(rows, 2))


@pytest.mark.parametrize("key_norm", ["row", "column"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_equations_token_by_token(key_norm, causal):
    mixer = create("linrec", dim=16, heads=2, key_norm=key_norm, causal=causal).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    y, wanted, g = mixer(x), loop(mixer, x), torch.randn(2, 9, 16, dtype=torch.float64)
    assert distance(y, wanted) < 1e-12
    got, expected = (torch.autograd.grad(t, [x, *mixer.parameters()], g) for t in (y, wanted))
    assert all(distance(a, b) < 1e-10 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("key_norm", ["row", "column"])
def test_forms_states_and_rows(key_norm):
    x = torch.randn(2, 41, 64, dtype=torch.float64)
    assert_forms(create("linrec", dim=64, key_norm=key_norm).double(), x)
    assert_bidirectional(create("linrec", dim=64, key_norm=key_norm, causal=False).double(), x)


def test_figures_of_the_authors_layer():
    """Their layer ignores its causal mask: these figures are the same with and without one.

    So it equals ours with ``causal=False``, which reads later tokens.
    """
    x = tokens(5, 5, 16).requires_grad_()
    theirs = waved(create("linrec", dim=16, heads=4, causal=False))
    y = theirs(x)
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x)
    assert distance(y.flatten()[::100], torch.tensor(VALUES, dtype=torch.float64)) < 1e-9
    assert distance(gradient.flatten()[::100], torch.tensor(GRADIENTS, dtype=torch.float64)) < 1e-9
    causal, later = waved(create("linrec", dim=16, heads=4)), x.detach().clone()
    later[:, 20:] = 1.0
    assert torch.equal(causal(later)[:, :20], causal(x)[:, :20]), "no token reads a later one"
    assert (theirs(later)[:, :20] - y[:, :20]).abs().amax() > 0.01, "theirs reads later tokens"


def test_another_norm_of_the_keys_is_refused():
    with pytest.raises(ValueError, match="key_norm must be one of 'row', 'column', but came as 'l2'"):
        create("linrec", dim=32, key_norm="l2")
