"""The kernels of the norms against their definition in float64."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified

from linattn.mixers.parts import HeadNorm, unit
from linattn.ops import norms
from linattn.ops.triton import norms as gpu
from tests.ops.errors import error
from tests.ops.triton.device import DEVICE, DTYPES, INTERPRETED, poisoned

LIMIT = {torch.float32: (1e-5, 1e-5), torch.float16: (0.0006, 0.0008), torch.bfloat16: (0.004, 0.005)}  # of values, of gradients
SHAPES = [(2, 7, 3, 5), (2, 3, 2, 16), (40, 8)] if INTERPRETED else [(2, 700, 3, 100), (2, 1000, 16, 128), (4000, 1024), (9, 8000)]


@pytest.fixture(autouse=INTERPRETED)
def small_tiles(monkeypatch):
    monkeypatch.setattr(gpu, "NUMBERS", 32)
    monkeypatch.setattr(gpu, "TILES", 2)


def arguments(shape: tuple[int, ...], weight: int, gate: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """``weight``: number of its axes, the last ones."""
    g = torch.Generator().manual_seed(sum(shape))
    shapes = {"x": shape} | ({"weight": shape[-weight:]} if weight else {}) | ({"gate": shape} if gate else {})
    return {name: torch.randn(size, generator=g).to(DEVICE, dtype) for name, size in shapes.items()}


def results(function, a: dict[str, Tensor], **options) -> list[Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in a.items()}
    with poisoned():
        y = function(**leaves, **options)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)
        return [y, *torch.autograd.grad(y, list(leaves.values()), weights)]


def check(a: dict[str, Tensor], eps: float = 1e-5) -> None:
    mine = results(norms.rms_norm, a, eps=eps, backend="triton")
    compare(mine, results(norms.rms_norm, {name: t.double() for name, t in a.items()}, eps=eps, backend="torch"), a["x"].dtype)


def compare(mine: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    values, gradients = LIMIT[dtype]
    assert mine[0].is_contiguous()
    for i, (m, w) in enumerate(zip(mine, wanted, strict=True)):
        assert m.dtype == dtype and error(m, w) <= (gradients if i else values), i


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("weight", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, weight, gate):
    if len(shape) > weight:
        check(arguments(shape, weight, gate))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [0, 2])
def test_halves(weight, dtype):
    check(arguments(SHAPES[1], weight, True, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_unit_length(shape, dtype):
    a = arguments(shape, 0, False, dtype)
    mine = results(norms.unit_length, a, eps=1e-6, dtype=dtype, backend="triton")
    wanted = results(norms.unit_length, {"x": a["x"].double()}, eps=1e-6, dtype=torch.float64, backend="torch")
    compare(mine, wanted, dtype)


def test_a_part_of_a_tensor_and_zeros():
    x = arguments((2, 5, 3, 8), 0, False)["x"][:, :, 1:, :]
    x[0, 0] = 0.0
    gate = arguments((2, 5, 8, 2), 0, False)["x"].mT
    check({"x": x, "gate": gate})
    w = results(norms.unit_length, {"x": x.double()}, eps=1e-6, dtype=torch.float64)
    compare(results(norms.unit_length, {"x": x}, eps=1e-6, dtype=torch.float32, backend="triton"), w, torch.float32)


def test_without_eps_rows_that_are_not_there_add_nothing():
    check(arguments((3, 1, 8), 1, False), eps=0.0)


def test_a_nan_stays_in_its_row():
    a = arguments(SHAPES[0], 1, True)
    y, dx, *_ = results(norms.rms_norm, a, eps=1e-5, backend="triton")
    a["x"][1, 2, 1, 3] = torch.nan
    z, dz, *_ = results(norms.rms_norm, a, eps=1e-5, backend="triton")
    seen = torch.zeros_like(y, dtype=torch.bool)
    seen[1, 2, 1] = True
    for before, after in ((y, z), (dx, dz)):
        assert after[seen].isnan().all() and torch.equal(after[~seen], before[~seen])


def test_the_same_bits_twice():
    a = arguments(SHAPES[1], 1, True)
    assert all(map(torch.equal, *(results(norms.rms_norm, a, eps=1e-5, backend="triton") for _ in range(2))))


def test_second_derivatives_are_those_of_the_definition():
    found = []
    for backend in ("triton", "torch"):
        a = {name: t.requires_grad_() for name, t in arguments((3, 2, 5), 1, True).items()}
        (g,) = torch.autograd.grad(norms.rms_norm(**a, eps=1e-5, backend=backend).square().sum(), a["gate"], create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), list(a.values())))
    for mine, wanted in zip(*found, strict=True):
        assert error(mine, wanted) <= 1e-5


def test_what_the_kernels_do_not_run():
    x = torch.ones(2, 3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="triton.*float64"):
        norms.rms_norm(x.double(), eps=1e-5, backend="triton")
    with pytest.raises(ValueError, match="triton.*8192"):
        norms.rms_norm(torch.ones(2, 9000, device=DEVICE), eps=1e-5, backend="triton")
    with pytest.raises(ValueError, match="gate must have shape"):
        norms.rms_norm(x, gate=x[0], eps=1e-5)
    with pytest.raises(ValueError, match="weight must have shape"):
        norms.rms_norm(x, x, eps=1e-5)
    assert norms.rms_norm(x[:0], eps=1e-5).shape == (0, 3, 4)


@pytest.mark.skipif(INTERPRETED, reason="needs an NVIDIA GPU")
def test_parts_use_them():
    x, norm = torch.randn(2, 300, 4, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True), HeadNorm(64).to(DEVICE)
    for y in (norm(x, x), unit(x, dtype=x.dtype)):
        assert type(y.grad_fn).__name__ == "KernelsBackward"
        assert y.dtype == x.dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_in_a_compiled_graph_are_an_operator(dtype):
    def function(x):
        return norms.unit_length(x[:, :, 1:], eps=1e-6, dtype=dtype, backend="triton")

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_module_simplified(graph, inputs, fw_compiler=lambda graph, _: graphs.append(graph) or make_boxed_func(graph))

    torch._dynamo.reset()
    x = arguments((2, 7, 3, 16), 0, False, dtype)["x"]
    compiled = results(torch.compile(function, fullgraph=True, backend=backend), {"x": x})
    assert all(torch.equal(a, b) for a, b in zip(compiled, results(function, {"x": x}), strict=True))
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert {"linattn.gpu_norm.default", "linattn.gpu_norm_backward.default"} <= names
