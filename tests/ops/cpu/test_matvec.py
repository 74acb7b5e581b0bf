"""The product of a matrix and one vector."""

import pytest
import torch

from linattn.ops.cpu.matvec import matvec, refusal
from tests.ops.errors import error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (5, 3), (32, 64), (33, 70), (70, 4100), (0, 8), (8, 0)])
def test_products(isa, N, K, dtype):
    w, x = torch.randn(N, K).to(dtype), torch.randn(1, 1, K).to(dtype)
    y = matvec(x, w)
    wanted = x.double() @ w.double().T
    assert y.shape == wanted.shape and y.dtype == dtype
    assert error(y.double(), wanted) <= {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
    assert torch.equal(matvec(x, w.mT.contiguous().mT), y) and torch.equal(matvec(x, torch.cat([w, w], 1)[:, :K]), y)


@pytest.mark.usefixtures("native")
def test_the_same_bits_for_any_number_of_threads(threads):
    w, x = torch.randn(1000, 300).bfloat16(), torch.randn(1, 300).bfloat16()
    results = []
    for number in (1, 2, 5):
        threads(number)
        results.append(matvec(x, w))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.usefixtures("native")
def test_what_it_does_not_take():
    w, x = torch.zeros(3, 4), torch.zeros(1, 4)
    assert refusal(x, w) is None
    assert "more than one vector" in refusal(torch.zeros(2, 4), w)
    assert "one dtype" in refusal(x.bfloat16(), w)
    assert "gradients" in refusal(x, w.requires_grad_())
    assert "float64" in refusal(x.double(), w.detach().double())
