"""Derivatives against finite differences in float64: first and second, of every kind, rank and form, through every result."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import linattn
from linattn.ops.gated import gated
from linattn.ops.norms import rms_norm
from linattn.ops.short_convolution import short_convolution
from tests.ops.cases import FORMS, KINDS, Call, make
from tests.sweeps import halved

RANKS = ("none", "H", "HK", "BTH", "BTHK")


def function(call: Call, form: str):
    """The call as a function of its tensors, and those tensors."""
    names = list(call.tensors)
    leaves = tuple(call.tensors[n].clone().requires_grad_() for n in names)
    return lambda *t: tuple(call.with_(**dict(zip(names, t, strict=True)))(form).values()), leaves


def small(kind: str, rank: str, **options: object) -> Call:
    return make(kind, rank, B=1, H=2, Hk=1, K=2, V=2, strength=(0.2, 2.0), **{"T": 3, **options})


@pytest.mark.parametrize(("kind", "rank", "form", "check"), halved(KINDS, RANKS, FORMS, [gradcheck, gradgradcheck]))
def test_first_and_second_derivatives(kind, rank, form, check):
    assert check(*function(small(kind, rank), form), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_first_derivatives_of_every_element(kind, form):
    assert gradcheck(*function(small(kind, "BTHK", T=2), form))


@pytest.mark.parametrize("kind", KINDS)
def test_across_a_chunk_and_packed(kind):
    """66 tokens in sequences of 0, 1 and 65: chunk borders, carried and empty states."""
    call = small(kind, "BTHK", lengths=(0, 1, 65))
    assert gradcheck(*function(call, "chunk"), fast_mode=True)
    assert gradgradcheck(*function(call, "chunk"), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("normalize", [False, "return", 0.5])
def test_without_causality(normalize, form):
    call = small("normalize" if normalize else "plain", "none").set(causal=False, normalize=normalize)
    call = call.with_(q=make("normalize", "none", B=1, T=5, H=1, K=2).tensors["q"])
    assert gradcheck(*function(call, form), fast_mode=True)
    assert gradgradcheck(*function(call, form), fast_mode=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_at_resets_are_finite(kind, form):
    """Finite differences are undefined at -inf; compares with the reference."""
    call = make(kind, "BTHK", T=20)
    decay = call.tensors["decay"].clone()
    decay[:, ::7], decay[:, 5, :, 1] = -torch.inf, -torch.inf
    mine, wanted = (second(call.with_(decay=decay), **how) for how in ({"form": form}, {"backend": "reference"}))
    for name, grad in mine.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def second(call: Call, **how: str) -> dict[str, torch.Tensor]:
    """The gradient of the squared norm of the gradient."""
    leaves = {n: t.clone().requires_grad_() for n, t in call.tensors.items()}
    out = call.with_(**leaves)(**how)
    grads = torch.autograd.grad(sum(o.sin().sum() for o in out.values()), list(leaves.values()), create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in grads), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, again, strict=True))


OPS = {
    "linear_attention": (lambda *t: linattn.linear_attention(*t[:3], decay=-t[3].abs()), [(2, 5, 2, 3)] * 4),
    "diagonal_scan": (lambda d, b: linattn.diagonal_scan(-d.abs(), b), [(2, 5, 3)] * 2),
    "selective_scan": (lambda x, A, B, C: linattn.selective_scan(x, x.abs(), -A.abs(), B, C), [(2, 5, 3), (3, 4), (2, 5, 4), (2, 5, 4)]),
    "short_convolution": (short_convolution, [(2, 5, 3), (3, 1, 4), (3,)]),
    "rms_norm": (lambda *t: rms_norm(*t, eps=1e-5), [(2, 5, 3), (3,), (2, 5, 3)]),
    "gated": (gated, [(2, 5, 3)] * 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_many_gradients_at_once(op, dtype):
    """``is_grads_batched``, of ``torch.autograd.functional.jacobian(vectorize=True)``: each equals the single gradient."""
    function, shapes = OPS[op]
    leaves = [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]
    y = function(*leaves)
    weights = torch.randn(3, *y.shape, dtype=dtype)
    together = torch.autograd.grad(y, leaves, weights, retain_graph=True, is_grads_batched=True)
    for i, w in enumerate(weights):
        for mine, alone in zip(together, torch.autograd.grad(y, leaves, w, retain_graph=True), strict=True):
            torch.testing.assert_close(mine[i], alone)
