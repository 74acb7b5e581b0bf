"""Gated Linear Attention against fla-core's recurrence."""

import torch

from linattn.mixers import CallContext, create
from tests.oracles.compare import fla, naive_distance


def test_fla():
    def naive(r):
        return fla("gla").naive_recurrent_gla(r.q, r.k, r.v, r.decay)[0]

    assert naive_distance(create("gla", dim=64), naive, 4 * torch.randn(2, 75, 64)) < 1e-5


def test_decay_is_the_sixteenth_root_of_a_sigmoid():
    mixer, x = create("gla", dim=64), torch.randn(2, 5, 64)
    low, high = mixer.decay_proj
    gate = torch.sigmoid(x @ low.weight.T @ high.weight.T + high.bias)
    assert low.weight.shape == (16, 64) and low.bias is None
    torch.testing.assert_close(mixer.project(x, CallContext(x)).decay.exp().flatten(-2), gate ** (1 / 16))
