"""Mamba-3, with one rank and several, against its recurrence step by step in float64.

The authors' references are in tests of a package that needs a GPU to be built, so the steps are written here from the paper's
equations: the trapezoid rule with its two terms, rotations by accumulated angles, and the gates.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles.compare import distance

NAMES = ["mamba3", "mamba3_mimo"]


def make(name, seed, groups=1):
    torch.manual_seed(seed)
    mixer = create(name, dim=32, head_dim=16, state_size=12, groups=groups).double()
    for key, p in mixer.named_parameters():
        if "proj" not in key:
            torch.nn.init.normal_(p, std=0.7)
    torch.nn.init.normal_(mixer.in_proj.weight, std=0.4)
    return mixer


def turn(t, angles, interleaved):
    """Pairs of channels of t [H, N] as complex numbers, the first ones times exp(i angle)."""
    half = t.shape[-1] // 2
    z = torch.complex(t[:, 0::2], t[:, 1::2]) if interleaved else torch.complex(t[:, :half], t[:, half:])
    z = z * torch.polar(torch.ones_like(z.real), F.pad(angles, (0, half - angles.shape[-1])))
    return torch.stack([z.real, z.imag], -1).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)


def steps(mixer, x):
    """One sequence [T, D]."""
    rank, heads, n, groups = mixer.rank, mixer.heads, mixer.state_size, mixer.groups
    state, angle, last, out = torch.zeros(heads, n, 16).double(), torch.zeros(heads, n // 4).double(), None, []
    for token in x:
        u, b, c, dt, a, trap, theta = mixer.in_proj(token).split(mixer.parts)
        dt, mix = F.softplus(dt + mixer.dt_bias), torch.sigmoid(trap)
        alpha = torch.exp(-torch.where(a >= 0, 1 + a, 1 / (1 - a)).clamp(min=1e-4) * dt)
        angle = angle + math.pi * torch.tanh(theta) * dt[:, None]
        keys, queries = [], []
        for r in range(rank):
            for into, t, norm, bias in ((keys, b, mixer.B_norm, mixer.B_bias), (queries, c, mixer.C_norm, mixer.C_bias)):
                t = F.rms_norm(t.view(rank, groups, n)[r], (n,), norm.weight, 1e-5).repeat_interleave(heads // groups, 0)
                into.append(turn(t + bias[:, r], angle, rank == 1))
        u = u.view(heads, 16)
        values = [u if rank == 1 else u * mixer.mimo_x[:, r] for r in range(rank)]
        now = sum(k[:, :, None] * v[:, None] for k, v in zip(keys, values, strict=True))
        scale = lambda w: w[:, None, None]  # noqa: E731
        state = scale(alpha) * state + scale(mix * dt) * now
        if last is not None:
            state = state + scale((1 - mix) * dt * alpha) * last
        last, z, y = now, mixer.g_proj(token).view(heads, 16), 0
        for r in range(rank):
            o = (queries[r][:, :, None] * state).sum(1) + mixer.D[:, None] * values[r]
            y = y + (o * F.silu(z) if rank == 1 else o * F.silu(z * mixer.mimo_z[:, r]) * mixer.mimo_o[:, r])
        out.append(mixer.o_proj(y.flatten()))
    return torch.stack(out)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_step_by_step(name, groups):
    mixer, x = make(name, groups, groups), torch.randn(1, 30, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = mixer(x)[0], steps(mixer, x[0])
    assert distance(y, wanted) < 1e-9
    wrt = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad(o.square().sum(), wrt) for o in (y, wanted))
    assert all(distance(a, b) < 1e-9 for a, b in zip(ours, theirs, strict=True))
    state, pieces = None, []
    for piece in x.split([5, 1, 1, 23], 1):
        o, state = mixer(piece, state, return_state=True)
        pieces.append(o)
    assert distance(torch.cat(pieces, 1)[0], wanted) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_mamba_ssm(name):
    """Shapes and order of its in_proj: gate, x, B, C, Δ, A, λ, angles (mamba_ssm/modules/mamba3.py)."""
    mixer = make(name, 3)
    theirs = {key: t.clone() for key, t in mixer.state_dict().items() if "proj" not in key}
    gate, rest = torch.randn(64, 32), torch.randn(sum(mixer.parts), 32)
    theirs |= {"in_proj.weight": torch.cat([gate, rest]), "out_proj.weight": torch.randn(32, 64)}
    mixer.load_mamba_ssm(theirs)
    assert torch.equal(mixer.g_proj.weight, gate.double()) and torch.equal(mixer.in_proj.weight, rest.double())
    r, n, h = mixer.rank, 12, 4
    assert len(theirs["in_proj.weight"]) == 2 * 64 + 2 * n * r + 3 * h + n // 4
