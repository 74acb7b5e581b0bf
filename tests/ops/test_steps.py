"""Steps in place equal scans with one more token in every backend, and refuse invalid arguments."""

import pytest
import torch

import linattn
from linattn.ops.convolution_step import step_
from linattn.ops.norms import unit_length
from linattn.ops.recurrent_step import recurrent_step_
from linattn.ops.selective_step import selective_step_
from tests.ops import cases
from tests.ops.errors import error
from tests.ops.steps import token

DOUBLE = {"dtype": torch.float64}


def recurrence(T=1, **how):
    """State, q, k, v, and decay and beta."""
    B, H, Hk, K, V = 2, 4, 2, 6, 5
    q, k = torch.randn(2, B, T, Hk, K, **how)
    options = {"decay": -torch.rand(B, T, H, **how), "beta": torch.rand(B, T, H, **how)}
    return torch.randn(B, H, K, V, **how), q, k, torch.randn(B, T, H, V, **how), options


def test_tokens_one_by_one_are_the_selective_scan():
    T, D, N = 9, 5, 3
    x, dt = torch.randn(2, T, D, **DOUBLE), torch.rand(2, T, D, **DOUBLE)
    A, D_, B, C = -torch.rand(D, N, **DOUBLE), torch.randn(D, **DOUBLE), *torch.randn(2, 2, T, N, **DOUBLE)
    state = torch.randn(2, D, N, **DOUBLE)
    wanted, last = linattn.selective_scan(x, dt, A, B, C, D_, initial_state=state, return_state=True)
    y = torch.stack([selective_step_(state, x[:, t], dt[:, t], A, B[:, t], C[:, t], D_) for t in range(T)], 1)
    assert error(y, wanted) < 1e-12 and error(state, last) < 1e-12


def test_in_heads_it_is_the_recurrence_of_mamba_2():
    T, H, P, N, G = 4, 4, 3, 5, 2
    x, dt, A = torch.randn(2, T, H, P, **DOUBLE), torch.rand(2, T, H, **DOUBLE), -torch.rand(H, **DOUBLE)
    B, C = torch.randn(2, 2, T, G, N, **DOUBLE)
    state = torch.randn(2, H, P, N, **DOUBLE)
    wanted, last = linattn.linear_attention(
        C, B, x * dt[..., None], decay=dt * A, scale=1.0, initial_state=state.mT.contiguous(), return_state=True
    )
    steps, rates = dt[..., None].expand(-1, -1, -1, P), A[:, None, None].expand(H, P, N)
    y = torch.stack([selective_step_(state, x[:, t], steps[:, t], rates, B[:, t], C[:, t]) for t in range(T)], 1)
    assert error(y, wanted) < 1e-12 and error(state.mT, last) < 1e-12


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_recurrence_is_moved_on_where_it_is(backend, dtype):
    state, q, k, v, options = recurrence(dtype=dtype)
    wanted = linattn.linear_attention(
        *(unit_length(t, eps=1e-6, dtype=dtype) for t in (q, k)), v, **options, initial_state=state, return_state=True, backend="reference"
    )
    place = state.data_ptr()
    o = recurrent_step_(state, q, k, v, **options, unit=1e-6, backend=backend)
    assert state.data_ptr() == place
    assert all(error(a, b) < 2e-6 for a, b in zip((o, state), wanted, strict=True))


def test_what_the_kernels_leave():
    """Torch's operations run for unsupported strides, float64 states, and gradients."""
    for case in (token(6, 4), token(6, 4).double()):
        case.state = torch.stack([case.state, case.state], -1)[..., 0]
        y, state = case.step()
        contiguous = token(6, 4).to(torch.float32)
        assert error(y.float(), contiguous.step()[0]) < 1e-6 and error(state.float(), contiguous.step()[1]) < 1e-6
    case = token(6, 4)
    case.tensors["x"].requires_grad_()
    y, state = case.step()
    assert y.requires_grad and state.requires_grad
    state, q, k, v, options = recurrence()
    own = state.mT.contiguous().mT
    o = recurrent_step_(own, q, k, v, **options)
    assert error(o, recurrent_step_(state, q, k, v, **options)) < 1e-6 and error(own, state) < 1e-6
    assert recurrent_step_(state, q, k.requires_grad_(), v, **options).requires_grad


def test_refusals():
    case = token(6, 4, heads=4, groups=2)

    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            selective_step_(changes.pop("state", case.state), **case.tensors | changes)

    refused(r"state must have shape .* came with \[6\]", state=torch.zeros(6))
    refused("B must have shape .* G dividing H", B=torch.zeros(2, 3, 4))
    refused("B must have shape", B=torch.zeros(2, 4))
    refused(r"C must have shape .* \[2, 2, 5\]", C=torch.zeros(2, 2, 5))
    refused("x must have shape", x=torch.zeros(2, 4, 7))
    refused("bias must have shape", bias=torch.zeros(4))
    refused("state must be torch.float32", state=case.state.double())
    refused("must be on cpu", z=case.tensors["z"].to("meta"))
    with pytest.raises(ValueError, match="backend must be one of"):
        case.step("fast")
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        case.step("triton")
    state, q, k, v, options = recurrence()
    with pytest.raises(ValueError, match="beta must have shape"):
        recurrent_step_(state, q, k, v, beta=torch.ones(2, 1, 3))
    with pytest.raises(ValueError, match="initial_state must have shape"):
        recurrent_step_(state[:1].clone(), q, k, v, **options)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        recurrent_step_(state, q, k, v, backend="triton")
    with pytest.raises(ValueError, match=r"W of 2 to S \+ 1"):
        step_(torch.zeros(2, 1, 8), torch.zeros(2, 3, 8), torch.zeros(8, 1, 5), None, True)
    with pytest.raises(ValueError, match="bias must have shape"):
        step_(torch.zeros(2, 1, 8), torch.zeros(2, 3, 8), torch.zeros(8, 1, 4), torch.zeros(7), True)


def states_and_steps():
    """Tensors of each step in place, the state first, and the step."""
    state, q, k, v, options = recurrence()
    x, dt, A, B, C, D = torch.randn(2, 4), torch.rand(2, 4), -torch.rand(4, 3), *torch.randn(2, 2, 3), torch.randn(4)
    convolved = torch.randn(2, 3, 4), torch.randn(2, 1, 4), torch.randn(4, 1, 4), torch.randn(4)
    return {
        "recurrence": ((state, q, k, v), lambda *a: recurrent_step_(*a, **options)),
        "selective": ((torch.randn(2, 4, 3), x, dt, A, B, C, D), selective_step_),
        "convolution": (convolved, lambda state, x, weight, bias: step_(x, state, weight, bias, True)),
    }


@pytest.mark.parametrize("turned", [cases.turned, lambda t: torch._neg_view(-t)], ids=["imaginary", "dense"])
@pytest.mark.parametrize("step", ["recurrence", "selective", "convolution"])
def test_views_with_turned_signs(step, turned):
    """A state is updated in place even if it is a negative view."""
    tensors, run = states_and_steps()[step]
    for i in range(len(tensors)):
        own, wanted = [t.clone() for t in tensors], [t.clone() for t in tensors]
        own[i] = turned(own[i])
        assert error(run(*own), run(*wanted)) < 1e-6 and error(own[0], wanted[0]) < 1e-6
