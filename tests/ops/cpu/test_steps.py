"""The CPU kernels of steps in place, with each instruction set, against torch's operations in float64."""

import pytest
import torch

from linattn.ops.convolution_step import step_
from linattn.ops.cpu import convolution_step
from linattn.ops.recurrent_step import recurrent_step_
from tests.ops.errors import error
from tests.ops.steps import CHANNELS, LIMIT, Token, check_drift, token


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("case", CHANNELS)
def test_selective(isa, case, dtype):
    token(**case).to(dtype).check("cpu")


def test_selective_with_less(isa):
    case = token(20, 16)
    case.without("D", "z", "bias").check("cpu")
    case.options = {}
    case.tensors["dt"] = case.tensors["dt"].abs()
    case.check("cpu")


def test_time_steps_of_every_size(isa):
    """The softplus of a large number is the number, of a very negative one its exponential, not 0."""
    dt = torch.tensor([-80.0, -30.0, -17.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 17.0, 30.0, 80.0])
    state, one = torch.zeros(1, len(dt), 1), torch.ones(1, 1)
    case = Token(state, {"x": torch.ones(1, len(dt)), "dt": dt[None], "A": torch.zeros(len(dt), 1), "B": one, "C": one}, {"softplus": True})
    y, _ = case.step("cpu")
    assert (y.double() / torch.nn.functional.softplus(dt.double()) - 1).abs().max() < 3e-7


def test_a_slow_decay_does_not_drift(isa):
    """A factor rounded to float32 errs by up to 3e-8: 9e-6 of the state after 300 steps."""
    for turned in (False, True):
        check_drift(token(17, 3, heads=1, turned=turned), "cpu", 300)


def test_a_reset_clears_the_state(isa):
    for turned in (False, True):
        case = token(5, 3, heads=2, turned=turned)
        case.tensors["A"], case.options["limit"] = torch.full((2, 5, 3), -2000.0), (1.0, 2.0)
        case.check("cpu")


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("slots", [3, 4, 7])
@pytest.mark.parametrize("layout", ["rows", "channels"])
def test_convolution(isa, layout, slots, dtype):
    x, weight, bias = torch.randn(2, 1, 70).to(dtype), torch.randn(70, 1, 4), torch.randn(70).to(dtype)
    state = torch.randn(2, slots, 70).to(dtype)
    state = state if layout == "rows" else state.mT.contiguous().mT
    assert convolution_step.refusal(x, state, weight, bias, 0, 0) is None
    for activation, given in ((True, bias), (False, None)):
        own, wide = state.clone(memory_format=torch.preserve_format), state.double()
        y = step_(x, own, weight, given, activation)
        wanted = step_(x.double(), wide, weight.double(), None if given is None else given.double(), activation)
        assert y.dtype == dtype and error(y.double(), wanted) <= LIMIT[dtype]
        assert torch.equal(own.double(), wide) and own.stride() == state.stride()


def test_recurrence_in_place(isa):
    B, H, K, V = 2, 3, 7, 18
    q, k, v, state = torch.randn(B, 1, H, K), torch.randn(B, 1, H, K), torch.randn(B, 1, H, V), torch.randn(B, H, K, V)
    for decay in (-torch.rand(B, 1, H), -torch.rand(B, 1, H, K)):
        arguments = (q, k, v, decay, torch.rand(B, 1, H))
        own, wide = state.clone(), state.double()
        names = ("decay", "beta")
        o = recurrent_step_(own, *arguments[:3], **dict(zip(names, arguments[3:], strict=True)), unit=1e-6, backend="cpu")
        doubled = [t.double() for t in arguments]
        wanted = recurrent_step_(wide, *doubled[:3], **dict(zip(names, doubled[3:], strict=True)), unit=1e-6, backend="reference")
        assert error(o.double(), wanted) < 2e-6 and error(own.double(), wide) < 2e-6
