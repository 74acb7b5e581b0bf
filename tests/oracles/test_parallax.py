"""Parallax against fla-core's, against its definition by mean and covariance, and its limit."""

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.oracles.compare import assert_graded, assert_pieces, distance, fla


@pytest.mark.parametrize("piece", [256, 16])  # queries at a time
@torch.no_grad()
def test_fla(piece):
    torch.manual_seed(0)
    mixer, x = create("parallax", dim=64), 2 * torch.randn(2, 75, 64)
    mixer.piece = piece
    r = mixer.project(x, CallContext(x))
    wanted = mixer.read(fla("parallax").naive_parallax(r.q, r.probe, r.k, r.v), x)
    assert_pieces(mixer, x, wanted, [30, 1, 1, 43])


def covariance(mixer, x):
    """E v - ρ Cov(k, v), query by query."""
    r = mixer.project(x, CallContext(x))
    out = []
    for t in range(x.shape[1]):
        k, v = r.k[:, : t + 1], r.v[:, : t + 1]  # [B, S, H, ...]
        p = (torch.einsum("bhk,bshk->bsh", r.q[:, t], k) * mixer.size**-0.5).softmax(1)
        k_mean, v_mean = ((p[..., None] * u).sum(1, keepdim=True) for u in (k, v))
        together = torch.einsum("bsh,bshk,bshv->bhkv", p, k - k_mean, v - v_mean)
        out.append(v_mean[:, 0] - torch.einsum("bhk,bhkv->bhv", r.probe[:, t], together))
    return mixer.read(torch.stack(out, 1), x)


@pytest.mark.parametrize("rotary", [False, True])
def test_the_covariance(rotary):
    torch.manual_seed(1)
    mixer = create("parallax", dim=32, heads=2, rotary=rotary).double()
    mixer.piece = 5
    x = 2 * torch.randn(2, 18, 32, dtype=torch.float64)
    assert_graded(mixer, lambda x: covariance(mixer, x), x, list(mixer.parameters()))


@torch.no_grad()
def test_without_a_probe_it_is_softmax():
    mixer, softmax, x = create("parallax", dim=64), create("softmax", dim=64), torch.randn(2, 33, 64)
    mixer.probe_proj.weight.zero_()
    softmax.load_state_dict({name: t for name, t in mixer.state_dict().items() if "probe" not in name})
    assert distance(mixer(x), softmax(x)) < 1e-5


def test_probes_are_turned_as_queries_are():
    mixer, x = create("parallax", dim=32), torch.randn(1, 9, 32)
    mixer.probe_proj.weight.data.copy_(mixer.q_proj.weight)
    r = mixer.project(x, CallContext(x))
    assert torch.equal(r.probe, r.q)
