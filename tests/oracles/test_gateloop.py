"""GateLoop against the paper's recurrence in complex numbers."""

import math

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance


def complex_recurrence(mixer, x):
    """Token by token: [T, D] -> outputs [T, D], and the angles [T, D]."""
    heads = mixer.heads
    q, k, v = ((x @ p.weight.T).view(len(x), heads, -1) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    magnitude = torch.sigmoid(x @ mixer.decay_proj.weight.T + mixer.decay_proj.bias)
    angle = x @ mixer.angle_proj.weight.T + mixer.angle_proj.bias
    alpha = torch.polar(magnitude, angle).view(len(x), heads, -1, 1)
    s, outputs = torch.zeros(heads, k.shape[-1], v.shape[-1], dtype=alpha.dtype), []
    for a, write, read in zip(alpha, k[..., None] * v[:, :, None], q, strict=True):
        s = a * s + write
        outputs.append((read[..., None] * s).sum(1).real.flatten())
    return torch.stack(outputs), angle


def block(mixer, x):
    o, _ = complex_recurrence(mixer, x)
    return (F.rms_norm(o, x.shape[-1:], mixer.norm.weight, 1e-5) * F.silu(x @ mixer.g_proj.weight.T)) @ mixer.o_proj.weight.T


@pytest.mark.parametrize("heads", [1, 4, 32])
def test_values_and_gradients(heads):
    mixer = create("gateloop", dim=32, heads=heads).double()
    torch.nn.init.normal_(mixer.norm.weight)
    x = 2 * torch.randn(70, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = mixer(x[None])[0], block(mixer, x)
    assert distance(y, wanted) < 1e-12
    found = [torch.autograd.grad(o.pow(3).sum(), (x, *mixer.parameters())) for o in (y, wanted)]
    assert all(distance(a, b) < 1e-10 for a, b in zip(*found, strict=True))


@torch.no_grad()
def test_the_phase_after_a_hundred_thousand_tokens():
    """In float32, where a sum of so many angles would err by tenths of a turn, in one pass and in pieces."""
    mixer = create("gateloop", dim=32, heads=4)
    mixer.angle_proj.bias.add_(3.0)  # always in the same direction
    mixer.decay_proj.bias.add_(2.0)
    x = torch.randn(1, 100_000, 32)
    for pieces in (x.split(100_000, 1), x.split([1, 40_000, 7, 59_991, 1], 1)):
        state = None
        for piece in pieces:
            y, state = mixer(piece, state, return_state=True)
        angles = torch.cat([mixer.angle_proj(piece)[0] for piece in pieces])
        exact = torch.tensor([math.fsum(column) for column in angles.T.tolist()], dtype=torch.float64)
        turns = (state["phase"][0] - exact) / (2 * math.pi)
        assert (turns - turns.round()).abs().max() < 1e-10
    mixer, tail = mixer.double(), 600  # σ(2)^600 is negligible
    assert distance(y[0].double(), block(mixer, x[0, -tail:].double())[-1:]) < 1e-5
