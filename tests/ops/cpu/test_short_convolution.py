"""The kernels of the short convolution against its definition in float64."""

import pytest
import torch

from linattn.ops.short_convolution import short_convolution
from tests.ops.errors import error, same_bits


def arguments(T=9, B=2, D=5, W=4, *, dtype=torch.float32, bias=True, before=True):
    random = torch.Generator().manual_seed(100 * T + W)
    shapes = {"x": (B, T, D), "weight": (D, 1, W)} | ({"bias": (D,)} if bias else {}) | ({"before": (B, W - 1, D)} if before else {})
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def everything(a, backend="cpu", *, activation=True, weights=None):
    """The result and all gradients."""
    leaves = {n: t.detach().requires_grad_() for n, t in a.items()}
    y = short_convolution(**leaves, activation=activation, backend=backend)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16() if weights is None else weights
    return {"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), weights.to(y.dtype)), strict=True))


def check(a, limit=1e-6, **options):
    mine, wanted = everything(a, **options), everything({n: t.double() for n, t in a.items()}, "reference", **options)
    for name, right in wanted.items():
        assert mine[name].shape == right.shape and mine[name].dtype == (a["x"] if name == "y" else a[name]).dtype
        least = error(right.to(mine[name].dtype), right)
        assert error(mine[name].double(), right, floor=1e-30) <= max(limit, 1.01 * least), name


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize(
    ("T", "B", "D", "W"), [(1, 1, 1, 4), (2, 2, 5, 4), (9, 3, 16, 1), (9, 2, 67, 2), (257, 1, 65, 3), (600, 2, 130, 4)]
)
def test_values_and_gradients(isa, T, B, D, W, activation):
    check(arguments(T, B, D, W), activation=activation)


@pytest.mark.parametrize(("bias", "before"), [(True, False), (False, True), (False, False)])
def test_without(isa, bias, before):
    check(arguments(300, 2, 20, bias=bias, before=before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(isa, dtype):
    check(arguments(260, 2, 70, dtype=dtype))


def test_a_wide_weight_beside_half_precision(isa):
    a = arguments(20, dtype=torch.bfloat16)
    check({**a, "weight": a["weight"].float(), "bias": a["bias"].float()})


def test_parts_of_a_larger_tensor(isa):
    """A slice of the channels, every second token, and channels-first strides give equal results."""
    a = arguments(40, D=24)
    whole = torch.randn(2, 80, 60)
    for x in (whole[:, ::2, 7:31], whole.mT[:, 1:41, :24], whole[:, :40, ::2][..., :24]):
        mine = everything({**a, "x": x})
        same_bits(mine, everything({**a, "x": x.clone(memory_format=torch.contiguous_format)}))


def test_every_number_of_threads_gives_the_same_bits(isa, threads):
    a = arguments(600, 2, 130)
    threads(1)
    one = everything(a)
    for count in (2, 3):
        threads(count)
        same_bits(everything(a), one)


@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_a_nan_goes_no_further_than_its_taps(isa, at):
    a = arguments(300, 2, 20)
    clean = everything(a)
    a["x"][1, at, 3] = torch.nan
    spoiled = everything(a)
    for name, reach in (("y", slice(at, at + 4)), ("x", slice(max(0, at - 3), at + 4))):
        assert spoiled[name][1, reach, 3].isnan().any()
        clean[name][1, reach, 3] = spoiled[name][1, reach, 3] = 0.0
        same_bits({name: spoiled[name]}, {name: clean[name]})


@pytest.mark.parametrize("z", [-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0, 200.0, 1e30])
def test_silu_of_any_size(isa, z):
    a = {"x": torch.full((1, 3, 5), z), "weight": torch.ones(5, 1, 1)}
    mine, wanted = everything(a, weights=torch.ones(1, 3, 5)), everything(a, "torch", weights=torch.ones(1, 3, 5))
    torch.testing.assert_close(mine["y"], wanted["y"], rtol=1e-6, atol=1e-36)  # smaller exponentials may be 0
    torch.testing.assert_close(mine["x"], wanted["x"], rtol=1e-6, atol=1e-35)


@pytest.mark.usefixtures("native")
def test_the_operator_keeps_its_contract():
    a = {n: t.requires_grad_() for n, t in arguments().items()}
    for before, bias in ((a["before"], a["bias"]), (None, None)):
        torch.library.opcheck(torch.ops.linattn.short_convolution.default, (a["x"], before, a["weight"], bias, True, "cpu"))


@pytest.mark.usefixtures("native")
def test_what_it_does_not_run():
    a = arguments(W=5)
    with pytest.raises(ValueError, match="it takes up to 4 taps, and the weight has 5"):
        short_convolution(**a, backend="cpu")
    assert short_convolution(**a).shape == (2, 9, 5)
    with pytest.raises(ValueError, match="float64"):
        short_convolution(**{n: t.double() for n, t in arguments().items()}, backend="cpu")
    assert short_convolution(arguments()["x"][:, :0], arguments()["weight"], backend="cpu").shape == (2, 0, 5)


@pytest.mark.usefixtures("native")
def test_second_derivatives_come_from_torch():
    a = {n: t.requires_grad_() for n, t in arguments().items()}
    second = []
    for backend in ("cpu", "torch"):
        (g,) = torch.autograd.grad(short_convolution(**a, backend=backend).square().sum(), a["x"], create_graph=True)
        second.append(torch.autograd.grad(g.square().sum(), list(a.values())))
    for mine, wanted in zip(*second, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
