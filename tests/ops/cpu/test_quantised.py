"""Products of quantised matrices with a few vectors, against the matrices as float64."""

import pytest
import torch

from linattn.ops import linears as door
from linattn.ops.cpu import linears as cpu
from linattn.ops.torch.linears import Norm
from linattn.ops.torch.quantised import Quantised, dequantised, packed, signed
from tests.ops.errors import doubled

SIZES = [
    (33, 70, None),
    (5, 3, None),
    (40, 4100, None),
    (40, 32, 32),
    (40, 96, 32),
    (33, 160, 32),
    (65, 768, 32),
    (40, 192, 64),
    (65, 768, 64),
    (65, 768, 128),
]


def matrix(N, K, group):
    if group is None:
        return Quantised(torch.randint(-127, 128, (N, K), dtype=torch.int8), torch.rand(N) / 127)
    return Quantised(packed(torch.randint(-8, 8, (N, K))), (torch.randn(N, K // group) / 8).half())


def bound(x, w):
    """The largest error of each result: x is rounded to 2^-16 of the largest of each unit of 64, and products are summed in float32."""
    padded = torch.nn.functional.pad(x.double().abs(), (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
    half_step = padded.amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., : x.shape[-1]] / 32767 / 2
    sums = (x.double().abs() + half_step) @ w.abs().T
    return half_step @ w.abs().T + (w.shape[1] + 8) * 2.0**-23 * sums


def test_codes_of_4_bits_are_those_of_q4_0():
    numbers = torch.randint(-8, 8, (5, 96))
    codes = packed(numbers)
    assert torch.equal(signed(codes), numbers.to(torch.int8))
    for i in range(16):
        assert torch.equal((codes[:, 16 + i] & 15).int() - 8, numbers[:, 32 + i].int())
        assert torch.equal((codes[:, 16 + i] >> 4).int() - 8, numbers[:, 48 + i].int())
    scale = torch.rand(5, 3).half()
    wanted = torch.stack([numbers[:, j] * scale[:, j // 32].double() for j in range(96)], 1)
    assert torch.equal(dequantised(codes, scale, torch.float64), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_products(every_isa, rows, size, dtype):
    w, x = matrix(*size), (torch.randn(rows, size[1]) * torch.logspace(-3, 3, size[1])).to(dtype)
    x = x.clamp(-6e4, 6e4)
    floats = dequantised(*w, torch.float64)
    assert cpu.refusal(x, w) is None
    y = door.linears(x, [w], [None])[0]
    wanted = x.double() @ floats.T
    assert y.dtype == dtype
    error = (y.double() - wanted).abs()
    fits = wanted.abs() < torch.finfo(dtype).max / 2
    rounding = torch.finfo(dtype).eps / 2 * (wanted.abs() + bound(x, floats)) + 2.0**-24
    assert bool((error <= bound(x, floats) + rounding)[fits].all())


@pytest.mark.parametrize("size", [(37, 128, None), (37, 128, 64)])
def test_fused_neighbours(every_isa, size):
    a, b, plain = matrix(*size), matrix(*size), torch.randn(9, 128)
    x, gate, residual, bias = torch.randn(3, 128), torch.randn(3, 128), torch.randn(3, 37), torch.randn(37)
    weight = torch.randn(32)

    def both(weights, biases, **options):
        floats = [w.double() if isinstance(w, torch.Tensor) else dequantised(*w, torch.float64) for w in weights]
        wanted = door.linears(x.double(), floats, doubled(biases), **doubled(options))
        got = door.linears(x, weights, biases, **options)
        for mine, theirs in zip(got, wanted, strict=True):
            # of the sum of 128 products: 128 times the rounding of x, and as much again for float32 sums
            assert (mine - theirs).abs().max() <= 2e-3 * theirs.abs().max().clamp(min=1)

    both([a, plain, b], [bias, None, None])
    both([a], [None], norm=Norm(weight, 1e-5, 32, gate), residual=residual)
    both([a, b], [None, bias], norm=Norm(weight, 1e-5, 32), gated=True)
    both([a, plain], [None, None], finish=[[("sigmoid", None)], [("neg", None), ("exp", None)]])


def test_not_a_number_stays_one(every_isa):
    for size in ((8, 128, None), (8, 128, 64)):
        w, x = matrix(*size), torch.randn(2, 128)
        for bad in (torch.nan, torch.inf):
            x[0, 77] = bad
            y = door.linears(x, [w], [None])[0]
            assert bool((~y[0].isfinite()).all()) and bool(y[1].isfinite().all())


def test_scales_of_other_rows_do_not_matter(every_isa):
    """An infinite scale affects only its row; rows end within a vector of codes, so the next row's are loaded too."""
    w, x = matrix(8, 96, 32), torch.randn(1, 96)
    before = door.linears(x, [w], [None])[0]
    w.scale[5] = torch.inf
    after = door.linears(x, [w], [None])[0]
    assert not bool(after[0, 5].isfinite())
    assert torch.equal(after[0, [0, 1, 2, 3, 4, 6, 7]], before[0, [0, 1, 2, 3, 4, 6, 7]])


def test_rows(isa):
    ids = torch.tensor([[3, 0], [4, 3]])
    for size in SIZES[1:8]:
        w = matrix(*size)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for weight in (w, dequantised(*w, dtype)):
                y, run = cpu.bound_rows(weight, ids, dtype)
                run()
                assert torch.equal(y, dequantised(*w, dtype)[ids])


@pytest.mark.usefixtures("native")
def test_the_same_bits_for_any_number_of_threads_and_vectors(threads):
    for size in ((1000, 320, None), (1000, 320, 64)):
        w, x = matrix(*size), torch.randn(7, 320).bfloat16()
        results = []
        for number in (1, 2, 5):
            threads(number)
            results.append(door.linears(x, [w], [None])[0])
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        assert torch.equal(results[0], torch.cat([door.linears(row, [w], [None])[0] for row in x.split(1)]))
