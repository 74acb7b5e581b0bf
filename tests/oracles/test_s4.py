"""S4 against ESPnet's copy of the authors' kernel, with the same weights: the convolution, the steps and the state."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from linattn.ops import hippo
from linattn.ops.long_conv import impulse_response
from tests.oracles.compare import distance
from tests.oracles.ssm import convolved, decoded, espnet_s4

SIZE = 16


def pair(tokens):
    """A mixer away from HiPPO, and their kernel for ``tokens`` tokens with its weights."""
    torch.manual_seed(0)
    ours = create("s4", dim=32, state_size=SIZE).double()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.1 * torch.randn_like(p))
    w = torch.complex(-ours.log_A_real.exp(), ours.A_imag).detach()
    p, b, c = (torch.view_as_complex(t.detach().clone()) for t in (ours.P, ours.B, ours.C))
    theirs = espnet_s4().SSKernelNPLR(w, p[None], b, c[None].conj(), ours.log_dt.detach(), L=None).double()
    theirs._setup_C(tokens)
    return ours, theirs


def block(mixer, x, y):
    y = F.gelu(y + x * mixer.D)
    return F.glu(F.conv1d(y.mT, mixer.o_proj.weight[..., None], mixer.o_proj.bias), -2).mT


@pytest.mark.parametrize("tokens", [2, 37, 128, 300])
def test_kernels(tokens):
    ours, theirs = pair(tokens)
    wanted = theirs(L=tokens)[0][0].mT
    assert distance(ours.kernel(tokens), wanted) < 1e-9
    assert distance(impulse_response(*ours.system(), tokens), wanted) < 1e-9


def test_the_slip_in_the_copy(monkeypatch):
    """ESPnet's own steps show that its sum over half of the pairs is not its system's kernel, while the whole sum is."""
    _, theirs = pair(40)
    steps, _ = stepped(theirs, torch.eye(40, 1, dtype=torch.float64)[None].expand(1, 40, 32))
    assert distance(theirs(L=40)[0][0].mT, steps[0]) < 1e-9
    monkeypatch.setattr(espnet_s4(), "cauchy_naive", espnet_s4().cauchy_half)
    assert distance(theirs(L=40)[0][0].mT, steps[0]) > 0.1


@torch.no_grad()
def stepped(theirs, x):
    """Outputs and the last state of their recurrence."""
    theirs._setup_step()
    h, steps = theirs.default_state(x.shape[0]), []
    for t in range(x.shape[1]):
        y, h = theirs.step(x[:, t], h)
        steps.append(y[:, 0])
    return torch.stack(steps, 1), h[..., : SIZE // 2]


@pytest.mark.parametrize("tokens", [37, 128])
def test_values_and_gradients(tokens):
    ours, theirs = pair(tokens)
    x = torch.randn(2, tokens, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = ours(x), block(ours, x, convolved(x, theirs(L=tokens)[0][0].mT))
    assert distance(y, wanted) < 1e-9
    assert distance(torch.autograd.grad(y.square().sum(), x)[0], torch.autograd.grad(wanted.square().sum(), x)[0]) < 1e-9


def test_gradients_of_the_two_ways_to_the_kernel():
    ours, _ = pair(50)
    weight = torch.randn(50, 32, dtype=torch.float64)
    names = ("log_dt", "log_A_real", "A_imag", "P", "B", "C")
    leaves = [getattr(ours, n) for n in names]
    cauchy, powers = (torch.autograd.grad((k * weight).sum(), leaves) for k in (ours.kernel(50), impulse_response(*ours.system(), 50)))
    for a, b in zip(cauchy, powers, strict=True):
        assert distance(a, b) < 1e-8


def test_decoding():
    ours, theirs = pair(80)
    x = torch.randn(2, 80, 32, dtype=torch.float64)
    outputs, h = stepped(theirs, x)
    wanted = block(ours, x, outputs)
    y, state = ours(x, return_state=True)
    assert distance(y, wanted) < 1e-9
    assert distance(decoded(ours, x), wanted) < 1e-9
    assert distance(torch.complex(*state["S"][..., 0].chunk(2, -1)), h) < 1e-9


def test_where_it_starts():
    """Their eigenvalues are the other half of the pairs, and eigenvectors have phases of their own."""
    ours = create("s4", dim=32)
    w, p, b, _ = espnet_s4().nplr("legs", 64)
    order = w.imag.abs().argsort()
    assert distance(torch.complex(-ours.log_A_real.exp(), ours.A_imag)[0].detach(), w.conj()[order]) < 1e-5
    assert distance(ours.P[0].detach().norm(dim=-1), p[0, order].abs()) < 1e-4
    assert distance(ours.B[0].detach().norm(dim=-1), b[order].abs()) < 1e-4


def test_it_is_hippo():
    """The impulse response of the start, from a C of HiPPO's own coordinates, is that of the discretised LegS matrix."""
    a, b = hippo.legs(SIZE)
    v, read = hippo.nplr(SIZE)[3], torch.randn(SIZE, dtype=torch.float64)
    ours = create("s4", dim=32, state_size=SIZE).double()
    with torch.no_grad():
        ours.C.copy_(torch.view_as_real(read.to(v.dtype) @ v))
    step, eye = ours.log_dt.detach().exp()[0], torch.eye(SIZE, dtype=torch.float64)
    transition, written = torch.linalg.solve(eye - step / 2 * a, eye + step / 2 * a), torch.linalg.solve(eye - step / 2 * a, step * b)
    wanted = torch.stack([read @ torch.linalg.matrix_power(transition, n) @ written for n in range(60)])
    assert distance(ours.kernel(60)[:, 0].detach(), wanted) < 1e-6  # parameters start in float32
