"""HGRN against fla-core's recurrence, between the paper's gates and read-out; the complex one against its own, token by token."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from linattn import State
from linattn.mixers import cost, create
from linattn.mixers.decay.hgrn2 import forget
from tests.conformance.checks import CHECKS
from tests.oracles.compare import distance, fla


@pytest.mark.parametrize("lower_bound", [0.0, 0.7])
def test_fla(lower_bound):
    mixer = create("hgrn", dim=64, lower_bound=lower_bound)
    torch.nn.init.normal_(mixer.norm.weight)
    x = 4 * torch.randn(2, 75, 64)
    gate = lower_bound + (1 - lower_bound) * torch.sigmoid((x @ mixer.f_proj.weight.T).double())
    new = (1 - gate).float() * F.silu(x @ mixer.v_proj.weight.T)
    h, last = fla("hgrn").naive_recurrent_hgrn(new, gate.log().float(), output_final_state=True)
    o = F.rms_norm(h, (64,), mixer.norm.weight, 1e-5) * F.silu(x @ mixer.g_proj.weight.T)
    y, state = mixer(x, return_state=True)
    assert distance(y, o @ mixer.o_proj.weight.T) < 1e-5
    assert distance(state["h"], last) < 1e-5


def test_gates_near_zero_and_one():
    """In float32 against float64, each number by itself."""
    x = torch.tensor([-8000.0, -80.0, -20.0, -3.0, 0.0, 3.0, 15.0, 18.0, 25.0, 60.0])
    for lower in (0.0, 0.3, 0.99):
        wide, bound = x.double(), torch.tensor(lower, dtype=torch.float32).double()
        kept = 1 - bound
        wanted = torch.log1p(-kept * torch.sigmoid(-wide)) if lower else F.logsigmoid(wide)
        decay, key = forget(x, torch.tensor(lower))
        assert ((decay - wanted).abs() <= 1e-6 * wanted.abs()).all(), (lower, decay, wanted)
        assert (decay <= 0).all()
        assert ((key - kept * torch.sigmoid(-wide)).abs() <= 1e-6 * key.abs()).all()


def hgru(w, x, lower_bound):
    """Hgru1d of hgru-pytorch by its equations, with its names, in real numbers: [B, T, D] -> outputs, both parts of the state."""
    linear = lambda name, t: F.linear(t, w[f"{name}.weight"], w[f"{name}.bias"])  # noqa: E731
    inputs = F.silu(linear("input_proj", x)).unflatten(-1, (-1, 2))
    kept = lower_bound + (1 - lower_bound) * torch.sigmoid(linear("lambda_proj", x))
    cos, sin = kept * w["theta"][0].cos(), kept * w["theta"][0].sin()
    a, b = (1 - kept) * inputs[..., 0], (1 - kept) * inputs[..., 1]
    real = imaginary = torch.zeros_like(x[:, 0])
    states = []
    for t in range(x.shape[1]):
        real, imaginary = cos[:, t] * real - sin[:, t] * imaginary + a[:, t], cos[:, t] * imaginary + sin[:, t] * real + b[:, t]
        states.append(torch.cat([real, imaginary], -1))
    normed = F.layer_norm(torch.stack(states, 1), (2 * x.shape[2],), w["norm.weight"], w["norm.bias"])
    return linear("out_proj", normed * F.silu(linear("gate", x))), torch.stack([real, imaginary], -1)


@pytest.mark.parametrize("lower_bound", [0.0, 0.7])
def test_complex(lower_bound):
    sizes = {"input_proj": (128, 64), "lambda_proj": (64, 64), "gate": (128, 64), "out_proj": (64, 128)}
    w = {f"{name}.weight": 0.2 * torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    w |= {f"{name}.bias": torch.randn(size[0], dtype=torch.float64) for name, size in sizes.items()}
    w |= {"norm.weight": torch.randn(128, dtype=torch.float64), "norm.bias": torch.randn(128, dtype=torch.float64)}
    w |= {"theta": 3 * torch.rand(1, 1, 64, dtype=torch.float64)}
    mixer = create("hgrn", dim=64, lower_bound=lower_bound, complex_valued=True).double()
    mixer.lower_bound.fill_(lower_bound)
    names = {"input_proj": "v_proj", "lambda_proj": "f_proj", "gate": "g_proj", "out_proj": "o_proj"}
    own = {f"{names.get(n.partition('.')[0], n.partition('.')[0])}{n[len(n.partition('.')[0]) :]}": t for n, t in w.items()}
    mixer.load_state_dict({**own, "theta": w["theta"].flatten(), "lower_bound": mixer.lower_bound})
    x = torch.randn(2, 75, 64, dtype=torch.float64, requires_grad=True)
    for t in w.values():
        t.requires_grad_()
    (y, state), (wanted, last) = mixer(x, return_state=True), hgru(w, x, lower_bound)
    assert distance(y, wanted) < 1e-12 and distance(state["h"], last) < 1e-12
    parameters = dict(mixer.named_parameters())
    ours = torch.autograd.grad(y.square().sum(), [x, *(parameters[n] for n in own)])
    theirs = torch.autograd.grad(wanted.square().sum(), [x, *w.values()])
    assert all(distance(a, b.view_as(a)) < 1e-11 for a, b in zip(ours, theirs, strict=True))


def test_where_angles_start():
    """10000^(-2 i / dim), as in hgru-pytorch; they stay in float32 in any model."""
    mixer = create("hgrn", dim=64, complex_valued=True).bfloat16()
    assert mixer.theta.dtype == torch.float32 and mixer.theta[0] == 1
    torch.testing.assert_close(mixer.theta[32], torch.tensor(1e-4))
    assert create("hgrn", dim=64).bfloat16().theta is None


# All checks of numbers except "state_bytes", which uses the default; the state is twice as large.
COMPLEX = ("shape", "empty", "causality", "past", "rows", "finite", "resume", "packed", "padding", "untouched", "saved")


@pytest.mark.parametrize("check", [*COMPLEX, "checkpoint", "compile", "seed"])
def test_conformance_with_complex_numbers(check):
    CHECKS[check](partial(create, "hgrn", complex_valued=True))


def test_the_state_of_complex_numbers():
    _, state = create("hgrn", dim=64, complex_valued=True)(torch.randn(2, 9, 64), return_state=True)
    said = cost("hgrn", dim=64, tokens=9, batch=2, dtype=torch.float32, complex_valued=True).state_bytes
    assert state["h"].shape == (2, 64, 2) and State([state]).nbytes == said == 2 * (64 * 2 * 4 + 8)
