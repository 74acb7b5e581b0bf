"""Hedgehog against fla-core's normalised recurrence on features written here, and against the quadratic formula in float64."""

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla
from tests.oracles.similarity import assert_bidirectional, assert_forms, merged, projected, quadratic


def features(x, w):
    """x [B, H, T, d], w [H, d, d]."""
    e = torch.exp(x @ w)
    return torch.cat([e / e.sum(-1, keepdim=True), (1 / e) / (1 / e).sum(-1, keepdim=True)], -1)


def learned(**options):
    mixer = create("hedgehog", dim=64, **options).double()
    assert torch.equal(mixer.q_map[1], torch.eye(16, dtype=torch.float64)) and torch.equal(mixer.k_map, mixer.q_map)
    for w in (mixer.q_map, mixer.k_map):
        torch.nn.init.normal_(w, std=0.5)
    return mixer


@pytest.mark.parametrize("causal", [True, False])
def test_quadratic_formula(causal):
    mixer, x = learned(causal=causal), 2 * torch.randn(2, 70, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    q, k = features(q, mixer.q_map), features(k, mixer.k_map)
    assert distance(mixer(x), quadratic(mixer, q @ k.mT, v, lambda z: z)) < 1e-9
    (assert_forms if causal else assert_bidirectional)(mixer, x)


def test_fla():
    mixer, x = learned().float(), torch.randn(2, 75, 64)
    q, k, v = projected(mixer, x)
    q, k = features(q, mixer.q_map), features(k, mixer.k_map)
    heads_last = (t.transpose(1, 2) for t in (q, k, v))
    o = fla("linear_attn").naive_recurrent_linear_attn(*heads_last, scale=1.0, normalize=True)[0]
    assert distance(mixer(x), merged(mixer, o.transpose(1, 2))) < 1e-5


def test_the_floor_of_a_feature():
    """An underflowing softmax still reads and writes a little."""
    mixer, x = create("hedgehog", dim=32), 1e4 * torch.randn(1, 9, 32)
    r = mixer.recurrence(x, CallContext(x))
    assert r.q.min() == r.k.min() == torch.tensor(1e-12)
