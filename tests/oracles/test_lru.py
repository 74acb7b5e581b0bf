"""LRU against LRU-pytorch with the same weights, token by token; its D is a matrix, ours its diagonal."""

import pytest
import torch
import torch.nn.functional as F

from linattn.mixers import create
from tests.oracles import wheels
from tests.oracles.compare import distance
from tests.oracles.ssm import decoded


@pytest.fixture(autouse=True)
def double():
    """Set the default dtype, in which it allocates outputs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def pair(**options):
    torch.manual_seed(0)
    ours = create("lru", dim=32, state_size=24, **options).double()
    theirs = wheels.module("LRU-pytorch==0.1.3", "LRU_pytorch/LRU.py").LRU(32, 32, 24)
    own = {n: getattr(ours, n).detach() for n in ("nu_log", "theta_log", "gamma_log")}
    own |= {n: torch.view_as_complex(getattr(ours, n).detach()) for n in ("B", "C")}
    theirs.load_state_dict(own | {"D": torch.diag(ours.D.detach())})
    return ours, theirs


def block(mixer, y):
    """SequenceLayer of minimal-LRU: two maps, one gating the other."""
    first, second = (F.linear(F.gelu(y), w, b) for w, b in zip(mixer.o_proj.weight.chunk(2), mixer.o_proj.bias.chunk(2), strict=True))
    return first * torch.sigmoid(second)


@pytest.mark.parametrize("tokens", [1, 37, 100])
def test_values_and_gradients(tokens):
    ours, theirs = pair()
    x = torch.randn(2, tokens, 32, requires_grad=True)
    y, wanted = ours(x), block(ours, theirs(x))
    assert distance(y, wanted) < 1e-9
    names = ("gamma_log", "nu_log", "theta_log")[: 1 if tokens == 1 else 3]  # one token does not fade
    got = torch.autograd.grad(y.square().sum(), [x, *(getattr(ours, n) for n in names)])
    asked = torch.autograd.grad(wanted.square().sum(), [x, *(getattr(theirs, n) for n in names)])
    for a, b in zip(got, asked, strict=True):
        assert distance(a, b) < 1e-9


def test_decoding():
    ours, theirs = pair()
    x = torch.randn(2, 50, 32)
    assert distance(decoded(ours, x), block(ours, theirs(x))) < 1e-9


def test_where_it_starts():
    """|λ|² is uniform over the ring, γ normalises, the weights have the variances of minimal-LRU."""
    torch.manual_seed(0)
    ours = create("lru", dim=256, state_size=4096, r_min=0.5, r_max=0.9, max_phase=1.0)
    radius = torch.exp(-ours.nu_log.detach().exp())
    assert 0.5 <= radius.min() < 0.501 and 0.899 < radius.max() <= 0.9
    assert abs(radius.square().mean().item() - (0.25 + 0.81) / 2) < 0.01
    assert distance(ours.gamma_log.detach().exp(), torch.sqrt(1 - radius.square())) < 1e-6
    assert ours.theta_log.exp().max() <= 1.0
    assert abs(ours.B.detach().var().item() * 2 * 256 - 1) < 0.01 and abs(ours.C.detach().var().item() * 4096 - 1) < 0.01


@pytest.mark.parametrize("options", [{"r_min": 0.9, "r_max": 0.5}, {"r_max": 1.5}, {"state_size": 0}])
def test_refusals(options):
    with pytest.raises(ValueError, match="must be"):
        create("lru", dim=32, **options)
