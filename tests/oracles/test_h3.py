"""H3: its diagonal kernel against ESPnet's copy of the authors', the layer against its equations with both states in a loop."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from linattn.ops.long_conv import impulse_response
from tests.oracles.compare import distance
from tests.oracles.ssm import decoded, espnet_s4


def mixer(head_dim=1, state_size=8):
    torch.manual_seed(0)
    ours = create("h3", dim=32, head_dim=head_dim, state_size=state_size).double()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return ours


def diagonal(ours):
    a = torch.complex(-ours.log_A_real.exp(), ours.A_imag).detach()
    b, c = (torch.view_as_complex(t.detach().clone()) for t in (ours.B, ours.C))
    return espnet_s4().SSKernelDiag(a, b, c[None].conj(), ours.log_dt.detach(), disc="bilinear").double()


def loop(ours, x):
    """The equations: keys enter a shift register, then the bilinear step of a continuous system, token by token."""
    d, n = ours.head_dim, ours.state_size
    a = torch.complex(-ours.log_A_real.exp(), ours.A_imag)
    dt, b, c = ours.log_dt.exp()[:, None], torch.view_as_complex(ours.B), torch.view_as_complex(ours.C)
    register = torch.zeros(x.shape[0], 32, n, dtype=x.dtype)
    state = torch.zeros(x.shape[0], 32 // d, d, d, n // 2, dtype=torch.complex128)
    outputs = []
    for token in x.unbind(1):
        q, k, v = ours.q_proj(token), ours.k_proj(token), ours.v_proj(token)
        register = F.pad(register, (1, 0))[..., :n] + ours.shift_B * k[..., None]
        k = (ours.shift_C * register).sum(-1) + ours.shift_D * k
        q, k, v = (t.unflatten(-1, (-1, d)) for t in (q, k, v))
        kv = k[..., :, None] * v[..., None, :]  # [B, H, d, d]
        a_, b_, c_ = (t[:, None, None] for t in (a * dt / 2, b * dt, c))
        state = ((1 + a_) * state + b_ * kv[..., None]) / (1 - a_)
        y = 2 * (c_ * state).sum(-1).real + ours.D[:, None, None] * kv
        outputs.append(ours.o_proj((q[..., None] * y).sum(-2).flatten(-2)))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_the_diagonal_kernel(tokens):
    ours = mixer()
    assert distance(impulse_response(*ours.system(), tokens), diagonal(ours)(tokens)[0][0].mT) < 1e-9


@pytest.mark.parametrize("head_dim", [1, 4])
@pytest.mark.parametrize("tokens", [1, 5, 80])
def test_values_gradients_and_state(head_dim, tokens):
    ours = mixer(head_dim)
    x = torch.randn(2, tokens, 32, dtype=torch.float64, requires_grad=True)
    (y, state), (wanted, last) = ours(x, return_state=True), loop(ours, x)
    assert distance(y, wanted) < 1e-9
    got = torch.view_as_complex(state["S"])  # [B, H, K / 2, d d]
    assert distance(got.mT.unflatten(2, (head_dim, head_dim)), last) < 1e-9
    leaves = [x, *ours.parameters()]
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), leaves, materialize_grads=True) for o in (y, wanted)), strict=True):
        assert distance(a, b) < 1e-9


@pytest.mark.parametrize("head_dim", [1, 4])
def test_decoding(head_dim):
    ours = mixer(head_dim)
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    assert distance(decoded(ours, x), loop(ours, x)[0]) < 1e-9


def test_where_it_starts():
    """The shift system starts as a short convolution with taps C, whose variance is that of Conv1d's initialisation."""
    torch.manual_seed(0)
    ours = create("h3", dim=256)
    torch.testing.assert_close(ours.shift_kernel(), ours.shift_C)
    conv = torch.nn.Conv1d(1, 256, 64).weight
    assert abs(ours.shift_C.var().item() / conv.var().item() - 1) < 0.05
    a = espnet_s4().dplr("linear", 64, H=1)[0]
    assert distance(torch.complex(-ours.log_A_real.exp(), ours.A_imag)[:1].detach(), a) < 1e-6


def test_refusals():
    with pytest.raises(ValueError, match="head_dim"):
        create("h3", dim=32, head_dim=5)
