"""Gated random feature attention against fla-core's recurrence with a decay per head, and token by token in float64."""

import torch

from linattn.mixers import create
from tests.oracles.compare import distance, fla
from tests.oracles.similarity import assert_forms, merged, projected
from tests.oracles.test_rfa import learned


def gated(mixer, x):
    """φ(q), φ(k), v [B, H, T, ...] and the gate [B, H, T]."""
    q, k, v = projected(mixer, x)
    w = mixer.sigma * mixer.projection
    q, k = (torch.einsum("bhtd,hfd->bhtf", t / (t.norm(dim=-1, keepdim=True) + 1e-3), w) for t in (q, k))
    q, k = (0.1 * torch.cat([t.sin(), t.cos()], -1) for t in (q, k))
    return q, k, v, torch.sigmoid(x @ mixer.gate_proj.weight.T + mixer.gate_proj.bias).transpose(1, 2)


def test_token_by_token():
    mixer, x = learned("gated_rfa"), 2 * torch.randn(2, 70, 64, dtype=torch.float64)
    q, k, v, gate = gated(mixer, x)
    s, z, outputs = 0.0, 0.0, []
    for t in range(70):
        g = gate[:, :, t, None]
        s = g[..., None] * s + (1 - g)[..., None] * k[:, :, t, :, None] * v[:, :, t, None]
        z = g * z + (1 - g) * k[:, :, t]
        total = (q[:, :, t] * z).sum(-1, keepdim=True).clamp(min=1e-3)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], s) / total)
    assert distance(mixer(x), merged(mixer, torch.stack(outputs, 2))) < 1e-9
    assert_forms(mixer, x)


def test_fla():
    mixer, x = learned("gated_rfa").float(), torch.randn(2, 75, 64)
    q, k, v, gate = (t.transpose(1, 2) for t in gated(mixer, x))
    naive = fla("simple_gla").naive_recurrent_simple_gla
    sums, total = (naive(q, k * (1 - gate)[..., None], values, gate.log(), scale=1.0)[0] for values in (v, torch.ones_like(v)))
    assert distance(mixer(x), mixer.read(sums / total.clamp(min=1e-3), x)) < 1e-5


def test_a_closed_gate_keeps_the_state():
    mixer, x = create("gated_rfa", dim=32), torch.randn(1, 5, 32)
    _, state = mixer(x, return_state=True)
    with torch.no_grad():
        mixer.gate_proj.weight.zero_(), mixer.gate_proj.bias.fill_(200.0)
    _, after = mixer(x, state, return_state=True)
    torch.testing.assert_close(after["S"], state["S"])
