"""Linear attention without a normaliser against fla-core's recurrence."""

import torch

from linattn.mixers import create
from tests.oracles.compare import fla, naive_distance


def test_fla():
    def naive(r):
        return fla("linear_attn").naive_recurrent_linear_attn(r.q, r.k, r.v)[0]

    assert naive_distance(create("linear", dim=64), naive, torch.randn(2, 75, 64)) < 1e-5
