"""Products of matrices with a few vectors, and what stands around them."""

import pytest
import torch

from linattn.ops import linears as door
from linattn.ops.cpu import matvec
from tests.ops.errors import error

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def normal(*shape, dtype):
    return torch.randn(*shape).to(dtype)


def compare(dtype, x, weights, biases, **options):
    got = door.linears(x, weights, biases, **options)
    wide = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in options.items()}
    wanted = door.linears(x.double(), [w.double() for w in weights], [None if b is None else b.double() for b in biases], **wide)
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == dtype and mine.is_contiguous()
        assert error(mine.double(), theirs) <= LIMIT[dtype]
    return got


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(("N", "K"), [(1, 1), (5, 3), (32, 64), (33, 70), (70, 4100), (0, 8)])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_products(isa, rows, N, K, dtype):
    x, w, b = normal(rows, 1, K, dtype=dtype), normal(N, K, dtype=dtype), normal(N, dtype=dtype)
    assert matvec.refusal(x, w) is None
    one, two = compare(dtype, x, [w, w[: N // 2]], [None, None])
    assert torch.equal(one[..., : N // 2], two)
    compare(dtype, x, [w], [b])
    strided = door.linears(x, [w.mT.contiguous().mT, torch.cat([w, w], 1)[:, :K]], [None, None])
    assert torch.equal(strided[0], one) and torch.equal(strided[1], one)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("weight", [0, 1, 2])
def test_what_stands_around_them(isa, weight, dtype):
    x, gate, residual = (normal(3, n, dtype=dtype) for n in (60, 60, 37))
    a, b = normal(37, 60, dtype=dtype), normal(37, 60, dtype=dtype)
    shape = [None, (20,), (3, 20)][weight]
    norm = {"norm": None if shape is None else normal(*shape, dtype=dtype), "eps": 1e-5, "size": 20}
    for around in ({}, {"gate": gate}):
        compare(dtype, x, [a], [None], **norm, **around, residual=residual)
        compare(dtype, x, [a, b], [None, None], **norm, **around, gated=True)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_norms(isa, mean, gate):
    from linattn.ops import norms

    for weight in (None, torch.randn(20), torch.randn(3, 20)) if mean else (None,):
        x = torch.randn(2, 1, 3, 20)
        g = torch.randn(2, 1, 3, 20) * 20 if gate else None
        y, run = matvec.bound_norm(x, weight, g, 1e-6, mean=mean)
        run()
        wide = [None if t is None else t.double() for t in (x, weight, g)]
        assert error(y.double(), norms.portable(*wide, 1e-6, mean, torch.float64)) <= 1e-6


@pytest.mark.usefixtures("native")
def test_the_same_bits_for_any_number_of_threads_and_vectors(threads):
    w, x = torch.randn(1000, 300).bfloat16(), torch.randn(7, 300).bfloat16()
    results = []
    for number in (1, 2, 5):
        threads(number)
        results.append(door.linears(x, [w], [None])[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.equal(results[0], torch.cat([door.linears(row, [w], [None])[0] for row in x.split(1)]))


@pytest.mark.usefixtures("native")
def test_what_it_does_not_take():
    w, x = torch.zeros(3, 4), torch.zeros(1, 4)
    assert matvec.refusal(x, w) is None
    assert "more than 8 vectors" in matvec.refusal(torch.zeros(9, 4), w)
    assert "8 matrices" in matvec.refusal(x, *[w] * 9)
    assert "one dtype" in matvec.refusal(x.bfloat16(), w)
    assert "gradients" in matvec.refusal(x, w.requires_grad_())
    assert "float64" in matvec.refusal(x.double(), w.detach().double())
