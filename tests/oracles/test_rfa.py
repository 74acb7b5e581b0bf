"""Random feature attention against the quadratic formula in float64, by cosines of differences, and against fla-core's recurrence."""

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla
from tests.oracles.similarity import assert_bidirectional, assert_forms, merged, projected, quadratic


def learned(name="rfa", **options):
    mixer = create(name, dim=64, **options).double()
    torch.nn.init.uniform_(mixer.sigma, 0.5, 1.5)
    return mixer


def cosines(mixer, q, k):
    """0.01 Σ cos(w (q̂ - k̂)), [B, H, T, T]."""
    q, k = (t / (t.square().sum(-1, keepdim=True).sqrt() + 1e-3) for t in (q, k))
    difference = q[..., :, None, :] - k[..., None, :, :]  # [B, H, T, T, d]
    w = mixer.sigma * mixer.projection / mixer.tau
    return 0.01 * torch.einsum("bhtsd,hfd->bhtsf", difference, w).cos().sum(-1)


@pytest.mark.parametrize("causal", [True, False])
def test_quadratic_formula(causal):
    mixer, x = learned(tau=0.8, causal=causal), torch.randn(2, 41, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    assert distance(mixer(x), quadratic(mixer, cosines(mixer, q, k), v, lambda z: z.clamp(min=1.0))) < 1e-9
    (assert_forms if causal else assert_bidirectional)(mixer, x)


def test_fla():
    """Numerator and, with ones as values, denominator by another library's recurrence."""
    mixer, x = learned().float(), torch.randn(2, 75, 64)
    r, naive = mixer.project(x, CallContext(x)), fla("linear_attn").naive_recurrent_linear_attn
    sums, total = (naive(r.q, r.k, v, scale=1.0, normalize=False)[0] for v in (r.v, torch.ones_like(r.v)))
    assert distance(mixer(x), mixer.read(sums / total.clamp(min=1.0), x)) < 1e-5


def test_many_features_are_softmax_of_unit_vectors():
    """With σ = 1 and temperature τ² the expectation is exp(-‖q̂ - k̂‖² / 2τ²), which is softmax once rows are divided by their sums."""
    mixer = create("rfa", dim=32, heads=2, random_features=20_000, floor=1e-3).double()
    mixer.redraw(torch.Generator().manual_seed(0))
    x = torch.randn(1, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = projected(mixer, x)
    q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    assert distance(mixer(x), merged(mixer, wanted)) < 0.02


def test_bad_options_are_refused():
    for name in ("random_features", "tau", "floor"):
        with pytest.raises(ValueError, match=f"{name} must be positive, but came as 0"):
            create("rfa", dim=32, **{name: 0})
