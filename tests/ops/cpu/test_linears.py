"""Products of matrices with a few vectors, and fused neighbouring operations."""

import pytest
import torch

from linattn.ops import linears as door
from linattn.ops.cpu import linears as cpu
from linattn.ops.torch.linears import Norm
from tests.ops.errors import doubled, error

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}


def normal(*shape, dtype):
    return torch.randn(*shape).to(dtype)


def compare(dtype, x, weights, biases, **options):
    got = door.linears(x, weights, biases, **options)
    finish = options.get("finish", ())
    wanted = door.linears(*doubled((x, weights, biases)), **doubled(options))
    assert len(got) == len(wanted)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        steps = i < len(finish) and bool(finish[i])
        assert mine.shape == theirs.shape and mine.dtype == (torch.float32 if steps else dtype) and mine.is_contiguous()
        assert error(mine.double(), theirs) <= LIMIT[torch.float32 if steps else dtype]
    return got


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize(("N", "K"), [(1, 1), (5, 3), (32, 64), (33, 70), (70, 4100), (0, 8)])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_products(isa, rows, N, K, dtype):
    x, w, b = normal(rows, 1, K, dtype=dtype), normal(N, K, dtype=dtype), normal(N, dtype=dtype)
    assert cpu.refusal(x, w) is None
    one, two = compare(dtype, x, [w, w[: N // 2]], [None, None])
    assert torch.equal(one[..., : N // 2], two)
    compare(dtype, x, [w], [b])
    strided = door.linears(x, [w.mT.contiguous().mT, torch.cat([w, w], 1)[:, :K]], [None, None])
    assert torch.equal(strided[0], one) and torch.equal(strided[1], one)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("weight", [0, 1, 2])
def test_fused_neighbours(isa, weight, dtype):
    x, gate, residual = (normal(3, n, dtype=dtype) for n in (60, 60, 37))
    a, b = normal(37, 60, dtype=dtype), normal(37, 60, dtype=dtype)
    shape = [None, (20,), (3, 20)][weight]
    for own_gate in (None, gate):
        norm = Norm(None if shape is None else normal(*shape, dtype=dtype), 1e-5, 20, own_gate)
        compare(dtype, x, [a], [None], norm=norm, residual=residual)
        compare(dtype, x, [a, b], [None, None], norm=norm, gated=True)
        compare(dtype, x, [a, b], [normal(37, dtype=dtype), normal(37, dtype=dtype)], norm=norm, gated=True)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("rows", [1, 5])
def test_finishes(isa, rows, dtype):
    x, weights = normal(rows, 24, dtype=dtype) / 4, [normal(n, 24, dtype=dtype) for n in (5, 70, 33)]
    biases, vector = [None, normal(70, dtype=dtype), None], torch.randn(66)[::2]
    for finish in (
        [[("log_sigmoid", None), ("div", 16.0)], [], [("add", vector), ("softplus", None), ("mul", vector), ("neg", None)]],
        [[], [("sigmoid", None)], [("tanh", None), ("add", 0.5), ("exp", None), ("div", vector)]],
        [[("neg", None), ("exp", None)]],
    ):
        compare(dtype, x, weights, biases, finish=finish)


@pytest.mark.parametrize("name", ["log_sigmoid", "softplus", "sigmoid", "tanh", "exp", "neg"])
def test_steps_alone_are_exact_to_their_last_digits(isa, name):
    x = torch.cat([torch.linspace(-120, 120, 100_000), torch.randn(50_000), torch.randn(50_005) * 1e-4]).view(-1, 17)
    wanted = door.finished(x.double(), [(name, None)])
    there = (wanted.abs() >= 2.0**-124) & (wanted.abs() <= torch.finfo(torch.float32).max)  # smaller halves may be 0
    y = door.stepped(x, [(name, None)])
    assert ((y - wanted) / wanted)[there].abs().max() <= 4e-7
    assert bool((y[wanted == torch.inf] == torch.inf).all()) and bool((y[wanted.abs() < 2.0**-127] == 0).all())
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    y = door.stepped(odd, [(name, None)])
    torch.testing.assert_close(y, door.finished(odd, [(name, None)]), equal_nan=True, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("size", [1, 17, 500, 5000])
def test_steps_of_many_numbers(isa, size, dtype):
    x, add = torch.randn(3, 70, size).to(dtype), torch.randn(1, size)[0]
    steps = [("add", add), ("softplus", None), ("mul", -2.0)]
    y = door.stepped(x, steps)
    assert y.dtype == torch.float32 and y.is_contiguous() and cpu.steps_refusal(x, steps) is None
    assert error(y.double(), door.finished(x.double(), [("add", add.double()), *steps[1:]])) <= 1e-6
    assert error(door.stepped(x.mT, [("exp", None)]).double(), x.mT.double().exp()) <= 1e-6
    assert door.stepped(x[:0], steps).shape == (0, 70, size)


@pytest.mark.usefixtures("native")
def test_steps_with_gradients_are_torch_s():
    x, add = torch.randn(3, 5), torch.randn(5, requires_grad=True)
    assert "gradients" in cpu.steps_refusal(x, [("add", add)])
    door.stepped(x, [("add", add), ("sigmoid", None)]).sum().backward()
    assert add.grad is not None
    assert torch.autograd.gradcheck(lambda x: door.stepped(x, [("tanh", None), ("mul", 3.0)]), x.double().requires_grad_())


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_norms(isa, mean, gate):
    from linattn.ops import norms

    for weight in (None, torch.randn(20), torch.randn(3, 20)) if mean else (None,):
        x = torch.randn(2, 1, 3, 20)
        g = torch.randn(2, 1, 3, 20) * 20 if gate else None
        y, run = cpu.bound_norm(x, weight, g, 1e-6, mean=mean)
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
def test_refusals():
    w, x = torch.zeros(3, 4), torch.zeros(1, 4)
    assert cpu.refusal(x, w) is None
    assert "more than 8 vectors" in cpu.refusal(torch.zeros(9, 4), w)
    assert "8 matrices" in cpu.refusal(x, *[w] * 9)
    assert "one dtype" in cpu.refusal(x.bfloat16(), w)
    assert "gradients" in cpu.refusal(x, w.requires_grad_())
    assert "float64" in cpu.refusal(x.double(), w.detach().double())
