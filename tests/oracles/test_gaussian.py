"""Gaussian kernel attention against the exact kernel in float64, which it is with many features, and against its own formula."""

import pytest
import torch

from linattn.mixers import create, mixing_matrix
from tests.oracles.compare import distance
from tests.oracles.similarity import assert_bidirectional, assert_forms, projected, quadratic


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sigma", [1.0, 1.5])
def test_many_features_are_the_exact_kernel(causal, sigma):
    mixer = create("gaussian", dim=32, heads=2, random_features=40_000, eps=0.0, sigma=sigma, causal=causal).double()
    mixer.redraw(torch.Generator().manual_seed(0))
    x = 0.7 * torch.randn(1, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = projected(mixer, x)
    exact = torch.exp(-(torch.cdist(q, k) ** 2) / (2 * sigma**2 * 4))  # 4 = √16
    assert distance(mixer(x), quadratic(mixer, exact, v, lambda z: z)) < 0.02


@pytest.mark.parametrize("causal", [True, False])
def test_quadratic_formula(causal):
    mixer, x = create("gaussian", dim=64, eps=0.0, sigma=1.5, causal=causal).double(), 2 * torch.randn(2, 41, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    q, k = q / 3, k / 3  # 1.5 · 16^1/4
    features_q, features_k = (torch.exp(t @ mixer.projection.T - t.square().sum(-1, keepdim=True)) for t in (q, k))
    assert distance(mixer(x), quadratic(mixer, features_q @ features_k.mT, v, lambda z: z)) < 1e-9
    mixer.eps = 1e-4
    (assert_forms if causal else assert_bidirectional)(mixer, x)


def test_long_keys_weigh_little():
    """Unlike softmax: of two keys in the same direction the one nearer to the query gets more weight, not the longer one."""
    mixer = create("gaussian", dim=32, heads=1, random_features=20_000, eps=0.0).double()
    mixer.redraw(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj):
            p.weight.copy_(torch.eye(32))
    x = torch.zeros(1, 3, 32, dtype=torch.float64)
    x[0, :, 0] = torch.tensor([6.0, 1.0, 1.0])
    weights = mixing_matrix(mixer, x)[0, 0, -1]
    assert weights[0] < 0.2 and weights[1] > 0.4


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="sigma must be positive, but came as 0"):
        create("gaussian", dim=32, sigma=0)
