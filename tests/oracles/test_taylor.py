"""First-order Taylor attention against the quadratic formula in float64: similarity 1 + cos(q, k)."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.similarity import assert_bidirectional, assert_forms, projected, quadratic


@pytest.mark.parametrize("causal", [True, False])
def test_quadratic_formula(causal):
    mixer, x = create("taylor", dim=64, causal=causal).double(), 1e3 * torch.randn(2, 70, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)  # so long that 1e-6 beside their squared lengths does not count
    wanted = quadratic(mixer, 1 + F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1), v, lambda z: z)
    assert distance(mixer(x), wanted) < 1e-5
    unit_q, unit_k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    assert distance(mixer(x), quadratic(mixer, 1 + unit_q @ unit_k.mT, v, lambda z: z + 1e-6)) < 1e-9
    (assert_forms if causal else assert_bidirectional)(mixer, x)
