"""ReLU linear attention against performer-pytorch's bidirectional attention, and against the quadratic formula in float64."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import distance
from tests.oracles.similarity import assert_bidirectional, assert_forms, merged, projected, quadratic


def test_performer_pytorch():
    """Its generalised kernel scales queries and keys by d^-1/4, which cancels."""
    performer, mixer = standins.performer(), create("relu_attention", dim=64, causal=False).double()
    x = torch.randn(2, 41, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    q, k = (performer.generalized_kernel(t, projection_matrix=None, kernel_epsilon=0.0) for t in (q, k))
    assert distance(mixer(x), merged(mixer, performer.linear_attention(q, k, v))) < 1e-9


@pytest.mark.parametrize("causal", [True, False])
def test_quadratic_formula(causal):
    mixer = create("relu_attention", dim=64, causal=causal).double()
    x = torch.randn(2, 70, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    wanted = quadratic(mixer, q.clamp(min=0) @ k.clamp(min=0).mT, v, lambda z: z + 1e-15)
    assert distance(mixer(x), wanted) < 1e-9
    (assert_forms if causal else assert_bidirectional)(mixer, x)


def test_queries_that_meet_no_key_give_zero():
    mixer = create("relu_attention", dim=32)
    x = torch.zeros(1, 3, 32, requires_grad=True)
    y = mixer(x)
    assert not y.any() and torch.autograd.grad(y.sum(), x)[0].isfinite().all()
