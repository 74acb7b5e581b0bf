"""The GPU kernels of steps in place against torch's operations in float64."""

import pytest
import torch

from linattn.ops import convolution_step, dispatch
from linattn.ops.inputs import Inputs
from linattn.ops.recurrent_step import recurrent_step_
from linattn.ops.triton import convolution_step as convolution
from linattn.ops.triton import decode
from linattn.ops.triton import selective_step as selective
from tests.ops.errors import error
from tests.ops.steps import CHANNELS, LIMIT, Token, check_drift, token
from tests.ops.triton.device import DEVICE, DTYPES, INTERPRETED

LARGER = (
    []
    if INTERPRETED
    else [{"width": 1536, "size": 16, "rows": 8}, {"heads": 24, "width": 64, "size": 128, "turned": True, "expanded": True}]
)


@pytest.mark.parametrize("case", [*CHANNELS, *LARGER])
def test_selective(case):
    token(**case).to(torch.float32, DEVICE).check("triton")


@pytest.mark.parametrize("dtype", DTYPES)
def test_selective_dtypes(dtype):
    token(20, 6, heads=2).to(dtype, DEVICE).check("triton")
    token(20, 6).without("D", "z", "bias").to(dtype, DEVICE).check("triton")


def test_time_steps_of_every_size():
    dt = torch.tensor([-80.0, -30.0, -17.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 17.0, 30.0, 80.0], device=DEVICE)
    state, one = torch.zeros(1, len(dt), 1, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    tensors = {"x": torch.ones_like(dt)[None], "dt": dt[None], "A": torch.zeros(len(dt), 1, device=DEVICE), "B": one, "C": one}
    y, _ = Token(state, tensors, {"softplus": True}).step("triton")
    relative = (y.double() / torch.nn.functional.softplus(dt.double()) - 1).abs()
    assert (relative < 3e-7 * (1 + dt.abs())).all()  # precision of exp2 after a product with log2(e)


def test_a_slow_decay_does_not_drift():
    check_drift(token(3, 2, heads=1).to(torch.float32, DEVICE), "triton", 300)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["rows", "channels"])
@pytest.mark.parametrize("slots", [3, 4, 6])
@pytest.mark.parametrize("rows", [2, 7])  # in programs of one row, and of several, not all of which exist
def test_convolution(rows, slots, layout, dtype, monkeypatch):
    """A cache's state: more tokens than are read, channels before tokens."""
    called = []
    monkeypatch.setattr(convolution, "PROGRAMS", 7)
    run = convolution.step_
    monkeypatch.setattr(convolution, "step_", lambda *a: called.append(1) or run(*a))
    monkeypatch.setattr(dispatch, "device_refusal", lambda *_: None)
    x, weight, bias = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((rows, 1, 33), (33, 1, 4), (33,)))
    state = torch.randn(rows, slots, 33, device=DEVICE).to(dtype)
    state = state if layout == "rows" else state.mT.contiguous().mT
    own, wide = state.clone(memory_format=torch.preserve_format), state.double()
    y = convolution_step.step_(x, own, weight, bias, True)
    wanted = convolution_step.step_(x.double(), wide, weight.double(), bias.double(), True)
    assert called == [1] and error(y.double(), wanted) <= LIMIT[dtype]
    assert torch.equal(own.double(), wide) and own.stride() == state.stride()


def test_convolutions_of_more_rows_than_a_grid_has_room_for(monkeypatch):
    """65,536 rows on a GPU; the interpreter has no limit, so 2 there."""
    if INTERPRETED:
        monkeypatch.setattr(convolution, "MOST", 2)
    monkeypatch.setattr(dispatch, "device_refusal", lambda *_: None)
    called = []
    run = convolution.step_
    monkeypatch.setattr(convolution, "step_", lambda *a: called.append(1) or run(*a))
    for rows, wanted_calls in ((convolution.MOST, [1]), (convolution.MOST + 1, [])):
        x, weight, bias, own = (torch.randn(shape, device=DEVICE) for shape in ((rows, 1, 4), (4, 1, 4), (4,), (rows, 3, 4)))
        wide = own.double()
        y = convolution_step.step_(x, own, weight, bias, True)
        wanted = convolution_step.step_(x.double(), wide, weight.double(), bias.double(), True)
        assert error(y.double(), wanted) <= 1e-5 and torch.equal(own.double(), wide)
        assert called == wanted_calls
        called.clear()
    assert "at most" in convolution.refusal(x, own, weight, bias, 0, 0)


@pytest.mark.parametrize("rows", [3, 6])
def test_convolution_with_heads_of_unit_length(rows, monkeypatch):
    monkeypatch.setattr(dispatch, "device_refusal", lambda *_: None)
    monkeypatch.setattr(convolution, "PROGRAMS", 18)
    x, weight, state = (torch.randn(shape, device=DEVICE) for shape in ((rows, 1, 48), (48, 1, 4), (rows, 3, 48)))
    own, wide = state.clone(), state.double()
    y = convolution.step_(x, own, weight, None, True, 16, 32, 1e-6, False)
    wanted = convolution_step.step_(x.double(), wide, weight.double(), None, True)
    heads = wanted[..., :32].unflatten(-1, (2, 16))
    wanted[..., :32] = (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2)
    assert error(y.double(), wanted) <= 1e-5 and torch.equal(own.double(), wide)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_delta_rule_with_keys_of_unit_length(dtype, per_channel):
    B, H, Hk, K, V = 2, 4, 2, 6, 5
    mixed = torch.randn(B, 1, 2 * Hk * K + H * V, device=DEVICE).to(dtype)
    q, k, v = (t.unflatten(-1, (-1, n)) for t, n in zip(mixed.split([Hk * K, Hk * K, H * V], -1), (K, K, V), strict=True))
    decay = -torch.rand(B, 1, H, K, device=DEVICE) if per_channel else -torch.rand(B, 1, H, device=DEVICE)
    beta, state = torch.rand(B, 1, H, device=DEVICE).to(dtype), torch.randn(B, H, K, V, device=DEVICE)
    own, wide = state.clone(), state.double()
    o = recurrent_step_(own, q, k, v, decay=decay, beta=beta, unit=1e-6, backend="triton")
    rest = {"decay": decay.double(), "beta": beta.double()}
    wanted = recurrent_step_(wide, q.double(), k.double(), v.double(), **rest, unit=1e-6, backend="torch")
    assert error(o.double(), wanted) <= LIMIT[dtype] and error(own.double(), wide) < 2e-6


def test_more_rows_than_a_grid_has_room_for():
    most = selective.MOST
    assert selective.refusal(torch.empty(most, 1, 1)) is None
    assert f"at most {most} rows" in selective.refusal(torch.empty(most + 1, 1, 1))


def test_states_with_turned_signs_are_no_place_for_new_ones():
    state = torch._neg_view(torch.randn(2, 4, 3, device=DEVICE))
    assert "negated" in str(selective.refusal(state)) and "negated" in str(convolution.refusal(state[:, :1], state, state, None, 0, 0))
    q, v = torch.randn(2, 1, 4, 5, device=DEVICE), torch.randn(2, 1, 4, 3, device=DEVICE)
    state = torch._neg_view(torch.randn(2, 4, 5, 3, device=DEVICE))
    with pytest.raises(ValueError, match="negated view"):
        decode.step_(Inputs(q, q, v, 1.0, initial=state, return_state=True))
