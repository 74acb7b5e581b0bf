"""Rodimus against fla-core's gated recurrence with its gates, and in float64 against the paper's formulas, token by token."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import CallContext, create
from linattn.mixers.decay.rodimus import log_softplus
from tests.oracles.compare import distance, fla


def parts(mixer, x):
    """q, the tempered key, the gated value and the logarithm of the decay, [B, T, ...], and the skip term."""
    u = x @ mixer.u_proj.weight.T
    h = mixer.conv(u, CallContext(x))
    gate = F.softplus(h @ mixer.select_proj.weight.T + mixer.select_proj.bias)
    tau = torch.sigmoid(h @ mixer.tau_proj.weight.T + mixer.tau_proj.bias)
    low, high = mixer.beta_proj
    v = torch.sigmoid(u @ low.weight.T @ high.weight.T + high.bias) * u
    k = F.normalize(h @ mixer.k_proj.weight.T, dim=-1) * gate**tau
    return h @ mixer.q_proj.weight.T, k, v, -gate * tau, h * mixer.skip


def read(mixer, o, x):
    gated = o * F.silu(x @ mixer.g_proj.weight.T)
    return F.rms_norm(gated, o.shape[-1:], mixer.norm.weight, 1e-5) @ mixer.o_proj.weight.T


def loop(q, k, v, decay):
    s, outputs = k.new_zeros(k.shape[0], k.shape[2], v.shape[2]), []
    for t in range(k.shape[1]):
        s = decay[:, t, :, None].exp() * s + k[:, t, :, None] * v[:, t, None]
        outputs.append(torch.einsum("bk,bkv->bv", q[:, t], s) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), s


def test_fla():
    mixer, x = create("rodimus", dim=96), 2 * torch.randn(2, 75, 96)
    with torch.no_grad():
        q, k, v, decay, skip = parts(mixer, x)
        o, s = fla("gla").naive_recurrent_gla(*(t[:, :, None] for t in (q, k, v, decay)), output_final_state=True)
        y, state = mixer(x, return_state=True)
        assert distance(y, read(mixer, o[:, :, 0] + skip, x)) < 1e-5
        assert distance(state["S"].transpose(1, 2).flatten(2), s[:, 0]) < 1e-5


@pytest.mark.parametrize(("dim", "state_size"), [(32, 64), (96, 5)])
def test_values_states_and_gradients(dim, state_size):
    """Values in one head of 64, and in three of 64."""
    torch.manual_seed(0)
    mixer = create("rodimus", dim=dim, state_size=state_size).double()
    for weight in (mixer.norm.weight, mixer.skip):
        torch.nn.init.normal_(weight)
    x = 2 * torch.randn(2, 70, dim, dtype=torch.float64, requires_grad=True)
    y, state = mixer(x, return_state=True)
    *gated, skip = parts(mixer, x)
    o, last = loop(*gated)
    wanted = read(mixer, o + skip, x)
    assert distance(y, wanted) < 1e-10  # fla and the paper divide keys by their length alone, we by √(‖k‖² + 1e-12)
    assert distance(state["S"].transpose(1, 2).flatten(2), last) < 1e-10
    ours, theirs = (torch.autograd.grad(o.pow(3).sum(), (x, *mixer.parameters())) for o in (y, wanted))
    assert all(distance(a, b) < 1e-9 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_logarithm_of_a_small_softplus(dtype, tolerance):
    """From where the softplus is 0 in either dtype to where it equals its argument, with finite derivatives."""
    x = torch.tensor([-1e4, -700.0, -100.0, -16.0, -15.0, -14.0, -1.0, 0.0, 3.0, 19.0], dtype=dtype, requires_grad=True)
    y = log_softplus(x)
    exact = x.detach().double()
    wanted = torch.where(exact < -600, exact, torch.log1p(exact.clamp(min=-600).exp()).log())
    assert distance(y, wanted) < tolerance
    (slope,) = torch.autograd.grad(y.sum(), x)
    ratio = torch.sigmoid(exact) / torch.log1p(exact.clamp(min=-600).exp())
    assert distance(slope, torch.where(exact < -600, 1.0, ratio)) < 10 * tolerance
