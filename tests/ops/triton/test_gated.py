"""The kernels of gates against their definition in float64."""

import pytest
import torch

from linattn import ffn
from linattn.ops.gated import KERNELS, portable
from linattn.ops.triton import gated as gpu
from tests.ops.errors import error
from tests.ops.triton.device import DEVICE, DTYPES, INTERPRETED, poisoned

LIMIT = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
SHAPES = [(1,), (3, 37), (2, 5, 16)] if INTERPRETED else [(1,), (3, 37), (2, 5, 2001), (8, 4096, 2816)]


@pytest.fixture(autouse=INTERPRETED)
def small_programs(monkeypatch):
    monkeypatch.setattr(gpu, "NUMBERS", 32)


def arguments(*shape, dtype=torch.float32):
    random = torch.Generator().manual_seed(sum(shape))
    return [(4 * torch.randn(shape, generator=random)).to(DEVICE, dtype) for _ in ("gate", "x")]


def everything(a, function):
    """The result and both gradients."""
    leaves = [t.detach().requires_grad_() for t in a]
    with poisoned():
        y = function(*leaves)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y)
        return [y.detach(), *torch.autograd.grad(y, leaves, weights)]


@pytest.mark.parametrize("swish", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients(shape, dtype, swish):
    a = arguments(*shape, dtype=dtype)
    mine = everything(a, lambda gate, x: KERNELS["triton"](gate, x, swish))
    wanted = everything([t.double() for t in a], lambda gate, x: portable(gate, x, swish))
    for got, right in zip(mine, wanted, strict=True):
        assert got.shape == right.shape and got.dtype == dtype and got.is_contiguous()
        assert error(got, right) <= LIMIT[dtype]


def test_parts_of_a_larger_tensor():
    gate, x = arguments(40, 50)[0].mT.split((20, 30), 0)[0], arguments(40, 20)[0].mT
    one = everything([gate, x], lambda gate, x: KERNELS["triton"](gate, x, True))
    other = everything([gate.contiguous(), x.contiguous()], lambda gate, x: KERNELS["triton"](gate, x, True))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_large_gates():
    gate = torch.tensor([-80.0, 80.0, 0.0] if INTERPRETED else [-80.0, 80.0, 0.0, -1e38, 1e38], device=DEVICE)
    x = torch.ones_like(gate)
    for swish in (True, False):
        torch.testing.assert_close(KERNELS["triton"](gate, x, swish), portable(gate, x, swish))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs only what is asked for by name")
def test_a_layer_keeps_its_two_products():
    layer = ffn.create("swiglu", 64, hidden=1024).to(DEVICE, torch.bfloat16)
    x = torch.randn(4, 2048, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    before = torch.cuda.memory_allocated()
    out = layer(x)
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    product = 4 * 2048 * 1024 * 2
    assert 2 * product <= kept < 2.1 * product  # neither silu(gate) nor its product
    out.sum().backward()
