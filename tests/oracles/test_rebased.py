"""ReBased against fla-core's square of dot products; its sums are taken undivided, since its ε is 1e-6 and the paper's code has 1e-12."""

import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance, fla
from tests.oracles.similarity import assert_bidirectional, assert_forms, merged, quadratic


def prepared(mixer, x):
    """q and k [B, H, T, d] after one norm over all heads, and v."""
    q, k = (F.layer_norm(p(x), (64,), n.weight, n.bias) for p, n in ((mixer.q_proj, mixer.q_norm), (mixer.k_proj, mixer.k_norm)))
    return [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, k, mixer.v_proj(x))]


def learned(**options):
    mixer = create("rebased", dim=64, **options).double()
    for p in (*mixer.q_norm.parameters(), *mixer.k_norm.parameters()):
        torch.nn.init.normal_(p)  # away from ones and zeros
    return mixer


def test_fla():
    mixer, x, naive = learned(), 2 * torch.randn(2, 75, 64, dtype=torch.float64), fla("rebased").naive_parallel_rebased
    q, k, v = prepared(mixer, x)
    sums, total = naive(q, k, v, use_norm=False), naive(q, k, torch.ones_like(v), use_norm=False)
    assert distance(mixer(x), merged(mixer, sums / (total + 1e-12))) < 1e-9
    assert_forms(mixer, x)


def test_bidirectional():
    mixer, x = learned(causal=False), 2 * torch.randn(2, 41, 64, dtype=torch.float64)
    q, k, v = prepared(mixer, x)
    assert distance(mixer(x), quadratic(mixer, (q @ k.mT / 4) ** 2, v, lambda z: z + 1e-12)) < 1e-9
    assert_bidirectional(mixer, x)
