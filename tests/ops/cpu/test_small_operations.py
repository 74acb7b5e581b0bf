"""Small operations of a step equal torch's for all supported strides and dtypes; torch runs the rest."""

import pytest
import torch
import torch.nn.functional as F

from linattn.ops.cpu import small_operations
from linattn.ops.cpu.small_operations import small

aten = torch.ops.aten
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # one rounding
pytestmark = pytest.mark.usefixtures("isa")


def check(target, *args, digits=0.0, **kwargs):
    """Compare with torch within one rounding, and within ``digits`` of 1; the result's memory is initialised with NaN."""
    wanted = target(*args, **kwargs)
    value = torch.full_like(wanted, torch.nan)
    operation = small(target, args, kwargs, value)
    assert operation is not None
    operation.bound()()
    limit = LIMIT[wanted.dtype] * (1 if wanted.dtype == torch.float32 else 1.01)
    torch.testing.assert_close(value.double(), wanted.double(), rtol=limit, atol=max(limit / 16, digits), equal_nan=True)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("name", ["neg", "exp", "log_sigmoid", "relu", "sigmoid", "silu", "softplus", "square", "tanh"])
def test_operations_of_one(name, dtype):
    x = torch.cat([torch.randn(3, 37), torch.tensor([0.0, torch.nan, 5.0]).expand(3, 3)], 1).to(dtype)
    check(getattr(aten, name).default, x)
    check(getattr(aten, name).default, x[:, None, :1].expand(3, 5, 40))


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_operations_of_two(name, dtype):
    target, x = getattr(aten, name).Tensor, torch.randn(1, 1, 24, 50).to(dtype)
    check(target, x, torch.randn(1, 1, 24, 50).to(dtype))
    check(target, x, torch.randn(1, 1, 24, 1))  # float32, one number a head
    check(target, torch.randn(50).to(dtype), x)
    check(target, x[..., 3:20], x[..., :17])
    check(target, x, 1.75)
    check(target, x, x[0, 0, 0, 0])


@pytest.mark.parametrize("dtype", list(LIMIT))
def test_the_others(dtype):
    x, y = torch.randn(2, 5, 33).to(dtype), torch.randn(2, 5, 33).to(dtype)
    check(aten.clamp_min.default, x, 0.25)
    check(aten.lerp.Tensor, x, y, torch.rand(33).to(dtype))
    check(aten.lerp.Scalar, x, y, 0.75)
    check(aten.cat.default, [x, y[:, :1]], 1)
    check(aten.cat.default, [x, y], -1)
    check(aten.to.dtype, x, torch.float32)
    check(aten.to.dtype, x.float()[:, 1:3], dtype)
    check(aten.sum.dim_IntList, x.float(), [-1], True, digits=2e-6)  # cancelling terms
    check(aten.linalg_vector_norm.default, x.float(), 2.0, [-1], True)
    weight, bias = torch.randn(33).to(dtype), torch.randn(33).to(dtype)
    check(aten.layer_norm.default, x, [33], weight, bias, 1e-3)
    check(aten.layer_norm.default, 3 + x.float(), [33], digits=1e-6)  # numbers near 3 and their mean have a spacing of 2.4e-7


def test_what_is_left_to_torch():
    x = torch.randn(4, 6)

    def refused(target, *args, **kwargs):
        return small(target, args, kwargs, target(*args, **kwargs)) is None

    assert refused(aten.mul.Tensor, x.double(), 2.0)  # float64
    assert refused(aten.add.Tensor, x, x, alpha=2)
    assert refused(aten.softplus.default, x, 2.0)  # of a multiple of x
    assert refused(aten.add.Tensor, x, torch.arange(6))  # of integers
    assert refused(aten.mul.Tensor, x.mT, x.mT.contiguous())  # columns are not contiguous
    assert refused(aten.mul.Tensor, torch.randn(small_operations.FEW + 1), 2.0)
    assert refused(aten.sum.dim_IntList, x, [0], True)
    assert refused(aten.linalg_vector_norm.default, x, 1.0, [-1], True)
    assert refused(aten.cat.default, [x, torch.randn(0)], 0)
    assert refused(aten.cos.default, x)


def test_joined_operations_run_in_order():
    x, first, second = torch.randn(3, 40), torch.empty(3, 40), torch.empty(3, 40)
    steps = [small(aten.silu.default, (x,), {}, first), small(aten.mul.Tensor, (first, x), {}, second)]
    run = small_operations.joined(steps).bound()
    for _ in range(2):
        run()
        torch.testing.assert_close(second, F.silu(x) * x)
        x.normal_()
