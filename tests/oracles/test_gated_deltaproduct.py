"""DeltaProduct, with and without a decay, against fla-core's recurrence; its state through packed sequences, too."""

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla


def naive(r, substeps, cu=None):
    """q [B, T, H, K] beside k, v and beta of every substep, in fla's layout: substeps one after the other in time."""
    k, v, beta = (t.unflatten(2, (substeps, -1)).flatten(1, 2) for t in (r.k, r.v, r.beta))
    return fla("gated_delta_product").naive_recurrent_gated_delta_product(
        r.q, k, v, r.decay, beta, scale=r.q.shape[-1] ** -0.5, num_householder=substeps, cu_seqlens=cu
    )


@pytest.mark.parametrize("name", ["deltaproduct", "gated_deltaproduct"])
@pytest.mark.parametrize("options", [{}, {"substeps": 3, "negative_eigenvalues": False}, {"substeps": 1, "value_ratio": 1.0}], ids=str)
def test_fla(name, options):
    torch.manual_seed(0)
    mixer, x = create(name, dim=64, **options), 2 * torch.randn(2, 45, 64)
    with torch.no_grad():
        y, state = mixer(x, return_state=True)
        o, s = naive(mixer.project(x, CallContext(x)), mixer.substeps)
        assert distance(y, mixer.read(o, x)) < 1e-5
        assert distance(state["S"], s) < 1e-5


@pytest.mark.parametrize("name", ["deltaproduct", "gated_deltaproduct"])
def test_packed(name):
    torch.manual_seed(1)
    mixer, x, cu = create(name, dim=32), torch.randn(1, 30, 32), torch.tensor([0, 11, 30])
    with torch.no_grad():
        o, _ = naive(mixer.project(x, CallContext(x, cu_seqlens=cu)), 2, cu)
        assert distance(mixer(x, cu_seqlens=cu), mixer.read(o, x)) < 1e-5


def test_gradients():
    torch.manual_seed(2)
    mixer, x = create("gated_deltaproduct", dim=32), torch.randn(2, 20, 32, requires_grad=True)
    ours = torch.autograd.grad(mixer(x).square().sum(), [x, mixer.A_log])
    theirs = torch.autograd.grad(mixer.read(naive(mixer.project(x, CallContext(x)), 2)[0], x).square().sum(), [x, mixer.A_log])
    assert all(distance(g, w) < 1e-5 for g, w in zip(ours, theirs, strict=True))


def test_two_reflections_turn_by_twice_their_angle():
    """β = 2 twice is a rotation: impossible for one delta step, whose transition is symmetric (the paper's argument)."""
    angle = torch.tensor(0.3, dtype=torch.float64)
    first, second = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.stack([angle.cos(), angle.sin()])
    k = torch.stack([first, second]).view(1, 1, 2, 2)  # one token, one head, two substeps
    mixer = create("deltaproduct", dim=32, heads=1).double()
    from linattn.mixers import Recurrence

    r = Recurrence(torch.zeros(1, 1, 1, 2).double(), k, torch.zeros(1, 1, 2, 2).double(), beta=torch.full((1, 1, 2), 2.0).double())
    call = CallContext(k[:, :, 0], {"S": torch.eye(2, dtype=torch.float64)[None, None], "position": torch.zeros(1, dtype=torch.int64)})
    mixer.attend(r, call)
    turn = 2 * angle
    wanted = torch.stack([torch.stack([turn.cos(), -turn.sin()]), torch.stack([turn.sin(), turn.cos()])])
    torch.testing.assert_close(call.new["S"][0, 0], wanted)
