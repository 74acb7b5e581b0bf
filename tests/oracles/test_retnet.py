"""RetNet against its parallel form as torchscale writes it: rotary by rotate-every-two, decay mask, normalised scores."""

import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance


def every_two(x):
    """(x0, x1, x2, x3, ...) -> (-x1, x0, -x3, x2, ...)."""
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).reshape(x.shape)


def parallel(mixer, x, heads):
    """[B, T, D] with explicit [T, T] matrices; keys are scaled, not queries, and the scores are normalised twice."""
    batch, tokens, size = *x.shape[:2], x.shape[2] // heads
    q, k = ((x @ p.weight.T).view(batch, tokens, heads, size).transpose(1, 2) for p in (mixer.q_proj, mixer.k_proj))
    v = (x @ mixer.v_proj.weight.T).view(batch, tokens, heads, 2 * size).transpose(1, 2)
    angle = (1 / 10000 ** torch.linspace(0, 1, size // 2, dtype=x.dtype)).repeat_interleave(2)
    time = torch.arange(tokens, dtype=x.dtype)
    sin, cos = (time[:, None] * angle).sin(), (time[:, None] * angle).cos()
    q, k = (t * cos + every_two(t) * sin for t in (q, k * size**-0.5))
    decay = torch.log(1 - 2 ** (-5 - torch.arange(heads, dtype=x.dtype)))
    lag = time[:, None] - time
    mask = torch.where(lag >= 0, torch.exp(lag * decay[:, None, None]), 0.0)  # [H, T, T]
    mask = mask / mask.sum(-1, keepdim=True).sqrt()
    scores = q @ k.mT * mask
    scores = scores / scores.detach().sum(-1, keepdim=True).abs().clamp(min=1)
    o = (scores @ v).transpose(1, 2)  # [B, T, H, 2K]
    o = o / (o.square().mean(-1, keepdim=True)).sqrt()
    return (F.silu(x @ mixer.g_proj.weight.T) * o.flatten(-2)) @ mixer.o_proj.weight.T


def test_torchscale_parallel_form():
    mixer = create("retnet", dim=64, heads=4).double()
    mixer.norm.eps = 0.0  # without it the normalisations of the scores cancel
    x = torch.randn(2, 150, 64, dtype=torch.float64)
    assert distance(mixer(x), parallel(mixer, x, 4)) < 1e-12


def test_positions_go_on_after_a_state():
    mixer = create("retnet", dim=64, heads=2).double()
    mixer.norm.eps = 0.0
    x = torch.randn(1, 30, 64, dtype=torch.float64)
    _, state = mixer(x[:, :11], return_state=True)
    assert distance(mixer(x[:, 11:], state), parallel(mixer, x, 2)[:, 11:]) < 1e-12
