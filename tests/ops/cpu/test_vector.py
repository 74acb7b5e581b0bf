"""Vector arithmetic: exponentials, and 16-bit numbers."""

import pytest
import torch

from linattn.ops.cpu import library
from linattn.ops.cpu.library import DTYPES, call

ULP = 2.0**-23
HALVES = torch.arange(2**16, dtype=torch.int32).to(torch.int16)


def same(a, b):
    return bool(((a == b) | (a.isnan() & b.isnan())).all() and torch.equal(a.signbit()[~a.isnan()], b.signbit()[~b.isnan()]))


@pytest.mark.parametrize("base_two", [False, True])
def test_exponentials(isa, base_two):
    x = torch.cat([torch.linspace(-86.0, 0.0, 200_001), -torch.logspace(-9, 2, 100_001), torch.tensor([0.0, -0.0])])
    lowest = -126.0 if base_two else -87.3
    y = library.empty(x.shape)
    call("exp_below", x, y, base_two, len(x))
    wanted = x.double().exp2() if base_two else x.double().exp()
    inside = x > lowest + 0.5
    assert (((y - wanted) / wanted)[inside]).abs().max() <= 1.0 * ULP
    assert torch.equal(y[x < lowest], torch.zeros_like(y[x < lowest])) and bool((y[-2:] == 1).all())


@pytest.mark.parametrize("base_two", [False, True])
def test_exponentials_of_no_numbers(isa, base_two):
    x = torch.tensor([-torch.inf, torch.nan, -1e30, -torch.inf, -1e-45])
    x = torch.cat([x, torch.tensor([0x7F800001, -1, 0x7FABCDEF], dtype=torch.int32).view(torch.float32)])  # other NaN patterns
    y = library.empty(x.shape)
    call("exp_below", x, y, base_two, len(x))
    assert torch.equal(y[[0, 2, 3, 4]], torch.tensor([0.0, 0, 0, 1])) and bool(y[[1, 5, 6, 7]].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_read(isa, dtype):
    x = HALVES.view(dtype)
    y = library.empty(x.shape)
    call("convert", x, DTYPES[dtype], y, DTYPES[torch.float32], len(x))
    assert same(y, x.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_to_16_bits(isa, dtype):
    exact = HALVES.view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    middles = (exact[1:] + exact[:-1]) / 2  # ties go to even
    many = torch.randn(100_003) * 10.0 ** torch.empty(100_003).uniform_(-9, 6)
    limits = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.9, 65520.0, 65504.0, 2.0**-25, 3 * 2.0**-25, 3.4e38])
    x = torch.cat([exact, middles, many, limits, torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)])
    x = x[(x.abs() >= 2.0**-126) | (x == 0) | x.isnan()]  # subnormals are 0 or not, depending on the processor's mode
    y = library.empty(x.shape, dtype)
    call("convert", x, DTYPES[torch.float32], y, DTYPES[dtype], len(x))
    assert same(y.float(), x.to(dtype).float())
