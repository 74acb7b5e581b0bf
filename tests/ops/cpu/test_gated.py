"""The kernels of gates against their definition in float64."""

import pytest
import torch

from linattn import ffn
from linattn.ops.gated import KERNELS, gated, portable
from tests.ops.errors import error, same_bits


def arguments(*shape, dtype=torch.float32):
    random = torch.Generator().manual_seed(sum(shape))
    return {name: (4 * torch.randn(shape, generator=random)).to(dtype) for name in ("gate", "x")}


def everything(a, function=lambda gate, x: KERNELS["cpu"](gate, x, True)):
    """The result and both gradients."""
    leaves = {n: t.detach().requires_grad_() for n, t in a.items()}
    y = function(*leaves.values())
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.dtype)
    return {"y": y.detach()} | {f"d_{n}": g for n, g in zip(leaves, torch.autograd.grad(y, list(leaves.values()), weights), strict=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (3, 37), (2, 5, 2001)])
def test_values_and_gradients(isa, shape, dtype):
    a = arguments(*shape, dtype=dtype)
    for swish in (True, False):
        mine = everything(a, lambda gate, x, swish=swish: gated(gate, x, swish=swish))
        wanted = everything({n: t.double() for n, t in a.items()}, lambda gate, x, swish=swish: portable(gate, x, swish))
        for name, right in wanted.items():
            assert mine[name].shape == right.shape and mine[name].dtype == dtype
            least = error(right.to(dtype), right)
            assert error(mine[name].double(), right, floor=1e-30) <= max(2e-6, 1.01 * least), name


def test_parts_of_a_larger_tensor(isa):
    gate, x = torch.randn(40, 3, 50).mT.split((20, 30), 1)[0], torch.randn(20, 40, 3).movedim(0, 1)
    same_bits(everything({"gate": gate, "x": x}), everything({"gate": gate.contiguous(), "x": x.contiguous()}))


def test_every_number_of_threads_gives_the_same_bits(isa, threads):
    a = arguments(5, 70_001)
    threads(1)
    one = everything(a)
    for count in (2, 3):
        threads(count)
        same_bits(everything(a), one)


@pytest.mark.usefixtures("native")
def test_a_layer_runs_them_unless_traced():
    layer, x = ffn.create("swiglu", 32), torch.randn(2, 3, 32)

    def steps(node):
        return {node.name()} | {name for before, _ in node.next_functions if before is not None for name in steps(before)}

    assert "KernelsBackward" in steps(layer(x).grad_fn)
    assert "KernelsBackward" not in steps(layer.double()(x.double()).grad_fn)
    compiled = torch.compile(gated, fullgraph=True, backend="eager")
    a = {n: t.requires_grad_() for n, t in arguments(3, 20).items()}
    assert torch.equal(compiled(*a.values()), portable(*a.values()))
    trained = gated(*a.values())
    with torch.no_grad():  # a recomputed layer must give equal results
        assert torch.equal(gated(*a.values()), trained)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("swish", [True, False])
def test_second_derivatives_are_the_definition_s(swish):
    a = [t.requires_grad_() for t in arguments(3, 20).values()]
    second = []
    for function in (KERNELS["cpu"], portable):
        first = torch.autograd.grad(function(*a, swish).square().sum(), a, create_graph=True)
        second.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), a)])
    for mine, wanted in zip(*second, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
