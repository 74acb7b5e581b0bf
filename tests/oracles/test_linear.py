"""Linear attention without a normaliser against fla-core's recurrence, and bidirectional against its own formula."""

import torch

from linattn.mixers import create
from tests.oracles.compare import distance, fla, naive_distance
from tests.oracles.similarity import assert_bidirectional, projected


def test_fla():
    def naive(r):
        return fla("linear_attn").naive_recurrent_linear_attn(r.q, r.k, r.v)[0]

    assert naive_distance(create("linear", dim=64), naive, torch.randn(2, 75, 64)) < 1e-5


def test_bidirectional():
    mixer, x = create("linear", dim=64, causal=False).double(), torch.randn(2, 41, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    o = ((q @ k.mT / 4) @ v).transpose(1, 2)
    wanted = mixer.o_proj((o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * mixer.norm.weight).flatten(-2))
    assert distance(mixer(x), wanted) < 1e-12
    assert_bidirectional(mixer, x)
