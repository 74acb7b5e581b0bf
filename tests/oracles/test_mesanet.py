"""MesaNet against fla-core's exact solution, and in float64 against one of torch.linalg with its gradients."""

from dataclasses import replace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from linattn.mixers import CallContext, create
from tests.oracles.compare import distance, fla


def ridge(mixer):
    return torch.nn.functional.softplus(mixer.ridge_raw) + mixer.ridge


@pytest.mark.parametrize("heads", [2, 8])
def test_fla(heads):
    torch.manual_seed(0)
    mixer, x = create("mesanet", dim=64, heads=heads), 2 * torch.randn(2, 70, 64)
    torch.nn.init.normal_(mixer.ridge_raw)
    with torch.no_grad():
        r = mixer.project(x, CallContext(x))
        v = r.v / r.weight[..., None]
        o, h, g = fla("mesa_net").naive_mesa_net_exact(r.q, r.k, v, r.decay, ridge(mixer), r.weight)
        y, state = mixer(x, return_state=True)
        assert distance(y, mixer.read(o, x)) < 1e-5
        assert distance(state["H"], h) < 1e-5 and distance(state["G"], g) < 1e-5


def test_values_and_gradients_in_float64():
    torch.manual_seed(1)
    mixer, x = create("mesanet", dim=32, heads=2).double(), torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    r = mixer.project(x, CallContext(x))
    h, g, out = torch.zeros(2, 2, 16, 16).double(), torch.zeros(2, 2, 16, 16).double(), []
    for t in range(20):
        fade, k = r.decay[:, t].exp()[..., None, None], r.k[:, t]
        h = fade * h + r.weight[:, t, :, None, None] * k[..., :, None] * k[..., None, :]
        g = fade * g + k[..., :, None] * r.v[:, t, :, None, :]
        solved = torch.linalg.solve(h + torch.diag_embed(ridge(mixer)), r.q[:, t])
        out.append((solved[..., None] * g).sum(-2))
    wanted = mixer.read(torch.stack(out, 1), x)
    assert distance(mixer(x), wanted) < 1e-9
    wrt = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad(y.square().sum(), wrt) for y in (mixer(x), wanted))
    assert all(distance(a, b) < 1e-9 for a, b in zip(ours, theirs, strict=True))


def test_a_few_steps_are_those_of_conjugate_gradients():
    torch.manual_seed(2)
    mixer, x = create("mesanet", dim=32, heads=1, steps=3).double(), torch.randn(1, 15, 32, dtype=torch.float64)
    r = mixer.project(x, CallContext(x))
    h = torch.zeros(32, 32).double()
    for t in range(15):
        k = r.k[0, t, 0]
        h = r.decay[0, t, 0].exp() * h + r.weight[0, t, 0] * torch.outer(k, k)
    a, q = h + torch.diag(ridge(mixer)[0]), r.q[0, -1, 0]
    # three steps find the best x in span(q, Aq, A²q) in the norm of A
    basis = torch.linalg.qr(torch.stack([q, a @ q, a @ a @ q], 1))[0]
    best = basis @ torch.linalg.solve(basis.T @ a @ basis, basis.T @ q)
    eye = torch.eye(15, dtype=torch.float64)[None, :, None]
    weights = mixer.attend(replace(r, v=eye), CallContext(x, returning=False))[0, -1, 0]  # weights of the values
    fades = torch.stack([r.decay[0, j + 1 :, 0].sum().exp() for j in range(15)])
    assert distance(weights, fades * (r.k[0, :, 0] @ best)) < 1e-9


def test_derivatives_against_finite_differences():
    """Also second derivatives: the backward pass solves equations that are differentiable themselves."""
    torch.manual_seed(3)
    mixer, x = create("mesanet", dim=8, heads=2).double(), torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    _, state = mixer(torch.randn(1, 3, 8, dtype=torch.float64), return_state=True)
    past = state["H"].detach().requires_grad_()

    def function(x, ridge, half):
        h = state | {"H": half + half.mT}  # stays symmetric
        return torch.func.functional_call(mixer, {"ridge_raw": ridge}, (x, h))

    inputs = (x, mixer.ridge_raw.detach().clone().requires_grad_(), past)
    assert gradcheck(function, inputs, fast_mode=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


def test_steps_leave_nothing_for_the_backward_pass():
    def kept(steps):
        sizes, mixer, x = {}, create("mesanet", dim=32, steps=steps), torch.randn(1, 70, 32)

        def pack(t):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = mixer(x)
        assert y.requires_grad
        return sum(sizes.values())

    assert kept(30) == kept(2)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_gradients_of_any_size(size):
    """Squares neither under- nor overflow in the backward pass."""
    torch.manual_seed(4)
    mixer, x = create("mesanet", dim=32), torch.randn(1, 20, 32, requires_grad=True)
    y = mixer(x)
    (plain,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    (scaled,) = torch.autograd.grad(size * y.sum(), x)
    assert distance(scaled.double() / size, plain.double()) < 1e-5
