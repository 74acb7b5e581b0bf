"""Kernels that end a decoding step, against torch."""

import pytest
import torch

from linattn.ops.cpu import step_end

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (3,), (1, 1), (2, 7), (1, 16), (3, 33), (2, 3, 100), (1, 4099)]
INF, NAN = float("inf"), float("nan")


def same(x: torch.Tensor) -> None:
    assert step_end.refusal_of_argmax(x) is None
    y, run = step_end.bound_argmax(x)
    run()
    assert torch.equal(y, x.max(-1).indices)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_largest(shape, dtype):
    """Also in the tail of a row, among equal numbers and zeros of both signs, beside infinities and NaN."""
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype)
    same(x)
    same(x.round())
    same(torch.zeros_like(x).copysign(x))
    same(torch.full_like(x, -INF))
    for special in (INF, -INF, NAN):
        for place in (0, x.numel() // 2, x.numel() - 1):
            y = x.clone()
            y.view(-1)[place] = special
            same(y)
            y.view(-1)[-1] = special
            same(y)


def test_later_calls_read_the_current_numbers():
    x = torch.tensor([[1.0, 2.0, 0.0]])
    y, run = step_end.bound_argmax(x)
    run()
    assert y.tolist() == [1]
    x[0, 2] = 3.0
    run()
    assert y.tolist() == [2]


def test_what_is_refused():
    x = torch.randn(2, 8)
    assert "float64" in str(step_end.refusal_of_argmax(x.double()))
    assert "contiguous" in str(step_end.refusal_of_argmax(x[:, ::2]))
    assert "int32" in str(step_end.refusal_of_increase([torch.zeros(2, dtype=torch.int32)]))
    assert "contiguous" in str(step_end.refusal_of_increase([torch.zeros(4, dtype=torch.int64)[::2]]))


def test_counters():
    counters = [torch.arange(n) for n in (1, 5, 0)]
    assert step_end.refusal_of_increase(counters) is None
    run = step_end.bound_increase(counters)
    run()
    run()
    assert [t.tolist() for t in counters] == [[2], [2, 3, 4, 5, 6], []]
