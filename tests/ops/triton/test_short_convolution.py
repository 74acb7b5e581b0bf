"""The kernels of the short convolution against its definition in float64, and calls left to the portable form."""

import pytest
import torch
from torch import Tensor

from linattn.ops.short_convolution import KERNELS, short_convolution
from linattn.ops.triton import short_convolution as gpu
from tests.ops.errors import error
from tests.ops.triton.device import DEVICE, DTYPES, INTERPRETED, LATER, poisoned

LIMIT = {torch.float32: (1e-5, 1e-5), torch.float16: (0.0006, 0.0008), torch.bfloat16: (0.004, 0.005)}  # of values, of gradients
SIZES = [(5, 9), (11, 21)] if INTERPRETED else [(1, 64), (9, 1), (300, 100), (4096, 512), (1000, 4096)]  # T, D


@pytest.fixture(autouse=INTERPRETED)
def short_segments(monkeypatch):
    """Segments so short that few tokens fill several."""
    monkeypatch.setattr(gpu, "FORWARD", gpu.Config(channels=16, warps=1, tokens=2, groups=2))
    monkeypatch.setattr(gpu, "BACKWARD", gpu.Config(channels=16, warps=1, tokens=2, groups=5))


def arguments(T: int, D: int, W: int = 4, *, B: int = 2, dtype: torch.dtype = torch.float32, apart: bool = False) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(T + D + W)
    shapes = {"x": (B, T, D), "weight": (D, 1, W), "bias": (D,), "before": (B, W - 1, D)}
    a = {name: torch.randn(shape, generator=g).to(DEVICE, dtype) for name, shape in shapes.items()}
    if apart:  # x is a slice of a projection
        a["x"] = torch.randn(B, T, 2 * D, generator=g).to(DEVICE, dtype)[..., D:]
    return a


def results(a: dict[str, Tensor], backend: str, **options) -> list[Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in a.items()}
    with poisoned():
        y = short_convolution(**leaves, backend=backend, **options)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)
        return [y, *torch.autograd.grad(y, list(leaves.values()), weights)]


def check(a: dict[str, Tensor], **options) -> None:
    mine, wanted = results(a, "triton", **options), results({name: t.double() for name, t in a.items()}, "torch", **options)
    values, gradients = LIMIT[a["x"].dtype]
    assert mine[0].is_contiguous() and mine[0].dtype == a["x"].dtype
    assert error(mine[0], wanted[0]) <= values
    for name, m, w in zip(a, mine[1:], wanted[1:], strict=True):
        assert m.dtype == a[name].dtype and error(m, w) <= gradients, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D"), SIZES)
def test_values_and_gradients(T, D, dtype):
    check(arguments(T, D, dtype=dtype))


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("W", [2, pytest.param(3, marks=LATER), 8])
def test_taps(W, activation):
    for T in (1, 2, 9):
        check(arguments(T, 9, W, B=1), activation=activation)


@pytest.mark.parametrize("left_out", [("bias",), ("before",), ("bias", "before")])
def test_what_may_be_absent(left_out):
    check({name: t for name, t in arguments(9, 9).items() if name not in left_out})


def test_tokens_further_apart():
    a = arguments(9, 16, dtype=torch.float16, apart=True)
    assert not a["x"].is_contiguous()
    check(a)


def test_the_state_carries_on():
    a = {name: t for name, t in arguments(9, 9).items() if name != "before"}
    whole = short_convolution(**a, backend="triton")
    x = a.pop("x")
    parts = [short_convolution(x[:, :4], **a, backend="triton"), short_convolution(x[:, 4:], **a, before=x[:, 1:4], backend="triton")]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_a_nan_reaches_the_tokens_it_meets_and_no_other():
    a = arguments(11, 9)
    y, *_ = results(a, "triton")
    a["x"][0, 3, 5] = torch.nan
    z, *_ = results(a, "triton")
    seen = torch.zeros_like(y, dtype=torch.bool)
    seen[0, 3:7, 5] = True
    assert z[seen].isnan().all() and torch.equal(z[~seen], y[~seen])


def test_the_same_bits_twice():
    a = arguments(*((11, 9) if INTERPRETED else (4000, 1024)))
    assert all(map(torch.equal, results(a, "triton"), results(a, "triton")))


def test_second_derivatives_are_those_of_the_portable_form():
    found = []
    for backend in ("triton", "torch"):
        a = {name: t.double().to(torch.float32).requires_grad_() for name, t in arguments(5, 4).items()}
        (g,) = torch.autograd.grad(short_convolution(**a, backend=backend).square().sum(), a["x"], create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), list(a.values())))
    for mine, wanted in zip(*found, strict=True):
        assert error(mine, wanted) <= 1e-5


def test_operator():
    a = [t.requires_grad_() for t in arguments(5, 4).values()]
    x, weight, bias, before = a
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator, backward_operator = KERNELS.registered
    torch.library.opcheck(operator, (x, before, weight, bias, True, "triton"), test_utils=tests)
    arguments_ = [t.detach().float() for t in (torch.ones_like(x), x, before, weight, bias)]
    torch.library.opcheck(backward_operator, (*arguments_, True, "triton"), test_utils=tests[::2])
    assert all(t.is_contiguous() for t in backward_operator(*arguments_, True, "triton"))  # as compiled graphs take them to be


def test_what_the_kernels_do_not_run():
    a = arguments(5, 4)
    with pytest.raises(ValueError, match="triton.*float64"):
        short_convolution(a["x"].double(), a["weight"].double(), backend="triton")
    with pytest.raises(ValueError, match="triton.*2 to 8 taps"):
        short_convolution(a["x"], torch.zeros(4, 1, 9, device=DEVICE), backend="triton")
    assert short_convolution(a["x"].double(), torch.zeros(4, 1, 9, device=DEVICE).double()).shape == (2, 5, 4)
    assert short_convolution(a["x"][:, :0], a["weight"], backend="triton").shape == (2, 0, 4)


@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")
def test_captured_in_a_graph():
    a = {name: t.requires_grad_() for name, t in arguments(500, 256, dtype=torch.bfloat16).items()}

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(short_convolution(**a).sum(), list(a.values()))

    wanted = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mine = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, mine, wanted))
