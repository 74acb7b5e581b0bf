"""The kernels of the norms against their definition in float64."""

import pytest
import torch

from linattn.ops.norms import portable, rms_norm, unit_length
from tests.ops.errors import error, same_bits

EPS = 1e-5
SHAPES = [((1, 1, 1, 7), 1), ((2, 70, 3, 64), 1), ((2, 70, 3, 20), 2), ((3, 5, 130), 1), ((70, 3, 17), 2), ((4, 33), 1), ((9,), 1)]


def arguments(shape, own, *, weight=True, gate=True, dtype=torch.float32):
    random = torch.Generator().manual_seed(sum(shape))
    shapes = {"x": shape} | ({"weight": shape[-own:]} if weight else {}) | ({"gate": shape} if gate else {})
    return {name: torch.randn(s, generator=random).to(dtype) for name, s in shapes.items()}


def everything(a, backend="cpu", *, mean=True):
    """The result and all gradients."""
    leaves = {n: t.detach().requires_grad_() for n, t in a.items()}
    if backend == "definition":
        y = portable(leaves["x"], leaves.get("weight"), leaves.get("gate"), EPS, mean, leaves["x"].dtype)
    elif mean:
        y = rms_norm(**leaves, eps=EPS, backend=backend)
    else:
        y = unit_length(**leaves, eps=EPS, dtype=a["x"].dtype, backend=backend)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.dtype)
    return {"y": y.detach()} | {f"d_{n}": g for n, g in zip(leaves, torch.autograd.grad(y, list(leaves.values()), weights), strict=True)}


def check(a, **options):
    mine, wanted = everything(a, **options), everything({n: t.double() for n, t in a.items()}, "definition", **options)
    for name, right in wanted.items():
        assert mine[name].shape == right.shape and mine[name].dtype == a.get(name[2:], a["x"]).dtype
        least = error(right.to(mine[name].dtype), right)
        assert error(mine[name].double(), right, floor=1e-30) <= max(2e-6, 1.01 * least), name


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize(("shape", "own"), SHAPES)
def test_values_and_gradients(isa, shape, own, weight, gate):
    check(arguments(shape, own, weight=weight, gate=gate))


@pytest.mark.parametrize("shape", [(2, 70, 3, 20), (2, 70, 64)])
def test_unit_length(isa, shape):
    check(arguments(shape, 1, weight=False, gate=False), mean=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(isa, dtype):
    check(arguments((2, 70, 3, 20), 1, dtype=dtype))


def test_a_wide_gate_beside_half_precision(isa):
    a = arguments((2, 7, 3, 20), 1, dtype=torch.bfloat16)
    a["gate"] = a["gate"].float()
    leaves = {n: t.requires_grad_() for n, t in a.items()}
    y = rms_norm(**leaves, eps=EPS, backend="cpu")
    grads = torch.autograd.grad(y.sum(), list(leaves.values()))
    assert y.dtype == torch.float32 and [g.dtype for g in grads] == [t.dtype for t in leaves.values()]


def test_parts_of_a_larger_tensor(isa):
    a = arguments((2, 40, 3, 20), 1)
    whole = torch.randn(2, 80, 200)
    for flat in (whole[:, ::2, 7:67], whole[:, :40, ::2][..., :60], whole[:, :60].mT[:, :40]):
        x = flat.unflatten(-1, (3, 20))
        same_bits(everything({**a, "x": x, "gate": x}), everything({**a, "x": x.contiguous(), "gate": x.contiguous()}))


def test_every_number_of_threads_gives_the_same_bits(isa, threads):
    a = arguments((2, 200, 3, 20), 1)
    threads(1)
    one = everything(a)
    for count in (2, 3):
        threads(count)
        same_bits(everything(a), one)


def test_a_nan_stays_in_its_head(isa):
    a = arguments((2, 70, 3, 20), 1, weight=False)
    clean = everything(a)
    a["x"][1, 5, 1, 3] = torch.nan
    spoiled = everything(a)
    for name, t in spoiled.items():
        assert t[1, 5, 1].isnan().all() or name == "d_gate", name
        t[1, 5, 1] = clean[name][1, 5, 1] = 0.0
        same_bits({name: t}, {name: clean[name]})


@pytest.mark.usefixtures("native")
def test_what_it_does_not_run():
    with pytest.raises(ValueError, match="1 to 1024 channels"):
        rms_norm(torch.randn(2, 1025), eps=EPS, backend="cpu")
    with pytest.raises(ValueError, match="float64"):
        rms_norm(torch.randn(2, 5, dtype=torch.float64), eps=EPS, backend="cpu")
    for shape in ((2, 1025), (0, 5), (3, 0)):
        assert rms_norm(torch.randn(shape), eps=EPS).shape == shape


@pytest.mark.usefixtures("native")
def test_second_derivatives_and_compilers_take_the_definition():
    a = {n: t.requires_grad_() for n, t in arguments((2, 7, 3, 20), 1).items()}
    second = []
    for backend in ("cpu", "torch"):
        (g,) = torch.autograd.grad(rms_norm(**a, eps=EPS, backend=backend).square().sum(), a["x"], create_graph=True)
        second.append(torch.autograd.grad(g.square().sum(), list(a.values())))
    for mine, wanted in zip(*second, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(lambda x, w, g: rms_norm(x, w, g, eps=EPS), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*a.values()), rms_norm(**a, eps=EPS), rtol=1e-6, atol=1e-6)


def test_refusals():
    x = torch.zeros(2, 5, 4)
    for name, t in (("x", x.long()), ("x", x.to(torch.complex64)), ("weight", torch.ones(4).long()), ("gate", x.to(torch.complex64))):
        with pytest.raises(ValueError, match=f"{name} must be torch.float64 or .*, but came as {t.dtype}"):
            rms_norm(**{"x": x, name: t}, eps=EPS)
    with pytest.raises(ValueError, match="x must be torch.float64 or .*, but came as torch.int64"):
        unit_length(x.long(), eps=EPS, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x must have shape \[..., V\]"):
        rms_norm(torch.ones(()), eps=EPS)
    with pytest.raises(TypeError, match="x must be a tensor, but came as NoneType"):
        unit_length(None, eps=EPS, dtype=torch.float32)
