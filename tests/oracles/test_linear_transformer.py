"""The Linear Transformer against fla-core's normalised recurrence, and against the quadratic formula of the paper in float64."""

import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import distance, fla, naive_distance
from tests.oracles.similarity import assert_bidirectional, merged, projected, quadratic


def test_fla():
    def naive(r):
        return fla("linear_attn").naive_recurrent_linear_attn(r.q, r.k, r.v, scale=1.0, normalize=True)[0]

    assert naive_distance(create("linear_transformer", dim=64), naive, torch.randn(2, 75, 64)) < 1e-5


def test_quadratic_formula():
    mixer = create("linear_transformer", dim=64, heads=2).double()
    x = torch.randn(2, 40, 64, dtype=torch.float64)
    q, k, v = ((x @ p.weight.T).view(2, 40, 2, 32).transpose(1, 2) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    similarity = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
    o = similarity @ v / (similarity.sum(-1, keepdim=True) + 1e-6)
    assert distance(mixer(x), o.transpose(1, 2).flatten(-2) @ mixer.o_proj.weight.T) < 1e-12


def test_bidirectional():
    """Against performer-pytorch's attention, without an epsilon in the denominator on both sides."""
    mixer, x = create("linear_transformer", dim=64, causal=False).double(), torch.randn(2, 41, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    similarity = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    assert distance(mixer(x), quadratic(mixer, similarity, v, lambda z: z + 1e-6)) < 1e-12
    assert_bidirectional(mixer, x)
    mixer.normalize = 0.0
    assert distance(mixer(x), merged(mixer, standins.performer().linear_attention(F.elu(q) + 1, F.elu(k) + 1, v))) < 1e-12
