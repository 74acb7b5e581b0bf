"""S4D against ESPnet's copy of the authors' kernel, with the same weights, and against its recurrence in a loop."""

import math

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create, mixing_matrix
from linattn.ops.long_conv import impulse_response
from tests.oracles.compare import distance
from tests.oracles.ssm import convolved, decoded, espnet_s4


def pair(init, dim=32):
    """A mixer and their kernel with its weights: B is 1."""
    torch.manual_seed(0)
    ours = create("s4d", dim=dim, init=init).double()
    a = torch.complex(-ours.log_A_real.exp(), ours.A_imag).detach()
    theirs = (
        espnet_s4()
        .SSKernelDiag(a, torch.ones_like(a), torch.view_as_complex(ours.C.detach())[None].conj(), ours.log_dt.detach(), disc="zoh")
        .double()
    )  # it stores the conjugate of the given C
    return ours, theirs


def block(mixer, x, y):
    """Output stage of the minimal code, models/s4/s4d.py."""
    y = F.gelu(y + x * mixer.D)
    return F.glu(F.conv1d(y.mT, mixer.o_proj.weight[..., None], mixer.o_proj.bias), -2).mT


@pytest.mark.parametrize("init", ["lin", "inv"])
@pytest.mark.parametrize("tokens", [1, 37, 150])
def test_values_and_gradients(init, tokens):
    ours, theirs = pair(init)
    kernel = theirs(tokens)[0][0].mT  # [T, D]
    assert distance(impulse_response(*ours.system(), tokens), kernel) < 1e-9
    x = torch.randn(2, tokens, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = ours(x), block(ours, x, convolved(x, kernel))
    assert distance(y, wanted) < 1e-9
    names = ("log_dt", "A_imag", "C")
    got = torch.autograd.grad(y.square().sum(), [x, ours.log_A_real, *(getattr(ours, n) for n in names)])
    asked = torch.autograd.grad(wanted.square().sum(), [x, theirs.inv_A_real, *(getattr(theirs, n) for n in names)], allow_unused=True)
    for a, b in zip(got, asked, strict=True):
        assert distance(a, b.view_as(a)) < 1e-8


@pytest.mark.parametrize("init", ["lin", "inv"])
def test_decoding(init):
    ours, theirs = pair(init)
    x = torch.randn(2, 80, 32, dtype=torch.float64)
    wanted = block(ours, x, convolved(x, theirs(80)[0][0].mT))
    assert distance(decoded(ours, x), wanted) < 1e-9
    theirs._setup_step()
    h, steps = torch.zeros(2, 32, 32, dtype=torch.complex128), []
    for t in range(80):
        y, h = theirs.step(x[:, t], h)
        steps.append(y[:, 0])
    assert distance(decoded(ours, x), block(ours, x, torch.stack(steps, 1))) < 1e-9
    _, state = ours(x, return_state=True)
    assert distance(torch.view_as_complex(state["S"])[..., 0], h) < 1e-9


@pytest.mark.parametrize(("init", "scaling"), [("lin", "linear"), ("inv", "inverse")])
def test_where_it_starts(init, scaling):
    a = espnet_s4().dplr(scaling, 64, H=2)[0]
    ours = create("s4d", dim=32, init=init)
    assert distance(torch.complex(-ours.log_A_real.exp(), ours.A_imag)[:2].detach(), a) < 1e-6
    steps = create("s4d", dim=1024).log_dt.exp()
    assert 1e-3 <= steps.min() < 1.1e-3 and 0.09 < steps.max() <= 0.1
    assert math.isclose(create("s4d", dim=1024).C.detach().square().sum(-1).mean(), 1.0, rel_tol=0.03)


def test_refusals():
    for options, error in (({"init": "legs"}, "init must be one of"), ({"state_size": 3}, "state_size must be even")):
        with pytest.raises(ValueError, match=error):
            create("s4d", dim=32, **options)


def test_time_invariance():
    """Shifted tokens give shifted outputs."""
    ours, _ = pair("lin")
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    assert distance(ours(F.pad(x, (0, 0, 9, 0)))[:, 9:], ours(x)) < 1e-12
    matrix = mixing_matrix(ours, x)  # [B, H, T, T]
    assert distance(matrix[..., 1:, 1:], matrix[..., :-1, :-1]) < 1e-12
