"""Gated retention against fla-core's recurrence, and as a whole against its parallel form with explicit matrices."""

import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance, fla, naive_distance


def test_fla():
    def naive(r):
        return fla("simple_gla").naive_recurrent_simple_gla(r.q, r.k, r.v, r.decay)[0]

    assert naive_distance(create("gated_retnet", dim=64), naive, 4 * torch.randn(2, 75, 64)) < 1e-5


def parallel(mixer, x, heads):
    """YOCO's block with [T, T] matrices: rotary as multiplication of complex numbers, keys scaled, decays as a mask of products."""
    batch, tokens, size = *x.shape[:2], x.shape[2] // heads
    q, k, v = ((x @ p.weight.T).view(batch, tokens, heads, size).transpose(1, 2) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    angle = torch.arange(tokens)[:, None] / 10000 ** torch.linspace(0, 1, size // 2, dtype=x.dtype)
    turn = torch.polar(torch.ones_like(angle), angle)  # [T, K / 2]
    q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2) for t in (q, k))
    gate = torch.sigmoid(x @ mixer.decay_proj.weight.T).mT ** (1 / 16)  # [B, H, T]
    mask = torch.zeros(batch, heads, tokens, tokens, dtype=x.dtype)
    for i in range(tokens):
        for j in range(i + 1):
            mask[:, :, i, j] = gate[:, :, j + 1 : i + 1].prod(-1)
    o = ((q @ (k * size**-0.5).mT * mask) @ v).transpose(1, 2)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5)
    return (F.silu(x @ mixer.g_proj.weight.T) * o.flatten(-2)) @ mixer.o_proj.weight.T


def test_parallel_form():
    mixer = create("gated_retnet", dim=64, heads=2).double()
    x = 3 * torch.randn(2, 40, 64, dtype=torch.float64)
    wanted = parallel(mixer, x, 2)
    assert distance(mixer(x), wanted) < 1e-12
    _, state = mixer(x[:, :11], return_state=True)  # positions go on after a state
    assert distance(mixer(x[:, 11:], state), wanted[:, 11:]) < 1e-12
