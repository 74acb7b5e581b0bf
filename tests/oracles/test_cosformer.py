"""cosFormer against the quadratic formula in float64: ReLU similarities times the cosine of the distance."""

import math

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.similarity import assert_bidirectional, assert_forms, projected, quadratic


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tokens", [1, 70])
def test_quadratic_formula(causal, tokens):
    mixer, x = create("cosformer", dim=64, length=100, causal=causal).double(), torch.randn(2, tokens, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    i = torch.arange(tokens, dtype=torch.float64)
    weight = torch.cos(math.pi / 2 * (i[:, None] - i) / (100 if causal else tokens))
    wanted = quadratic(mixer, q.relu() @ k.relu().mT * weight, v, lambda z: z.clamp(min=1e-6))
    assert distance(mixer(x), wanted) < 1e-9
    if tokens > 1:
        (assert_forms if causal else assert_bidirectional)(mixer, x)


def test_the_least_denominator():
    """Sums of similarities below 1e-6 are replaced by it."""
    mixer, x = create("cosformer", dim=64, length=100).double(), 3e-4 * torch.randn(2, 70, 64, dtype=torch.float64)
    with torch.no_grad():
        mixer.q_proj.bias.zero_(), mixer.k_proj.bias.zero_()
    q, k, v = projected(mixer, x)
    i = torch.arange(70, dtype=torch.float64)
    similarity = q.relu() @ k.relu().mT * torch.cos(math.pi / 200 * (i[:, None] - i))
    total = similarity.tril().sum(-1)
    assert (total < 1e-6).any() and (total > 1e-6).any()
    assert distance(mixer(x), quadratic(mixer, similarity, v, lambda z: z.clamp(min=1e-6))) < 1e-9


def test_queries_that_meet_no_key():
    """The denominator is then 1e-6 and the numerator 0: the output is the last bias."""
    mixer, x = create("cosformer", dim=32), torch.randn(1, 4, 32)
    with torch.no_grad():
        mixer.q_proj.weight.zero_(), mixer.q_proj.bias.fill_(-1.0)
    torch.testing.assert_close(mixer(x), mixer.o_proj.bias.expand(1, 4, 32))


def test_positions_beyond_the_length_are_refused():
    mixer, x = create("cosformer", dim=32, length=6), torch.randn(1, 4, 32)
    _, state = mixer(x, return_state=True)
    mixer(x[:, :2], state)
    with pytest.raises(ValueError, match="made for sequences of length 6, but a token came at 7"):
        mixer(x[:, :3], state)
