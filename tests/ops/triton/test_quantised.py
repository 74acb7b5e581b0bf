"""The kernels of quantised matrices, combined with plain ones and with fused neighbours, against float64."""

import pytest
import torch

from linattn.models.quantised import Format
from linattn.ops.torch.linears import Norm, portable
from linattn.ops.torch.quantised import Quantised, dequantised
from linattn.ops.triton import quantised as gpu
from linattn.quantization.rounding import rounded
from tests.ops.errors import doubled, error
from tests.ops.triton.device import DEVICE, DTYPES, INTERPRETED, LATER, poisoned
from tests.sweeps import halved

LIMIT = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = [(64, (5, 17, 9))] if INTERPRETED else [(1024, (512, 512, 1024, 16)), (2816, (1000,)), (5632, (2048, 3)), (96, (70,))]
ROWS = [1, 3] if INTERPRETED else [1, 2, 17, 64, 200]
FORMATS = [Format("int8"), Format("int4", 32), Format("int4", 64)]


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def quantised(N, K, form):
    """A random matrix, with the next smaller group if that of ``form`` does not divide K."""
    if form.group is not None and K % form.group:
        form = Format("int4", 32)
    return rounded(normal(N, K), form)


def compare(dtype, x, weights, biases, **options):
    assert gpu.refusal(x, *weights) is None
    given = {"norm": None, "residual": None, "gated": False, "finish": (), **options}
    with poisoned():
        got = gpu.linears(x, weights, biases, *given.values(), None)
    floats = [w.double() if isinstance(w, torch.Tensor) else dequantised(*w, torch.float64) for w in weights]
    wanted = portable(*doubled((x, floats, biases)), **doubled(given))
    assert len(got) == len(wanted)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        finished = i < len(given["finish"]) and given["finish"][i]
        assert mine.shape == theirs.shape and mine.dtype == (torch.float32 if finished else dtype) and mine.is_contiguous()
        assert error(mine.double(), theirs) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("K", "outputs"), SIZES)
def test_products(K, outputs, rows, form, dtype):
    x, weights = normal(rows, 1, K, dtype=dtype), [quantised(n, K, form) for n in outputs]
    biases = [normal(2 * n, dtype=dtype)[::2] if i % 2 else None for i, n in enumerate(outputs)]
    compare(dtype, x, weights, biases)
    compare(dtype, x, weights, biases, norm=Norm(normal(K, dtype=dtype), 1e-5, K))
    compare(dtype, x, weights[:1], biases[:1], residual=normal(rows, 1, outputs[0], dtype=dtype), norm=Norm(None, 1e-5, K))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_plain_and_quantised_matrices_together(rows, dtype):
    K, sizes = (64, (5, 9, 17, 3)) if INTERPRETED else (1024, (512, 1024, 16, 300))
    x, (a, b, c, d) = normal(rows, K, dtype=dtype), sizes
    weights = [quantised(a, K, FORMATS[2]), normal(b, K, dtype=dtype), quantised(c, K, FORMATS[0]), quantised(d, K, FORMATS[2])]
    vector = normal(b)
    finish = [[], [("add", vector), ("softplus", None), ("mul", vector), ("neg", None)], [("sigmoid", None)], []]
    for biases in ([None] * 4, [normal(n, dtype=dtype) for n in sizes]):
        compare(dtype, x, weights, biases, norm=Norm(normal(K, dtype=dtype), 1e-5, K), finish=finish)
        compare(dtype, x, weights[:2], biases[:2])


GATES = [32, 8, 24] if INTERPRETED else [128, 16, 96]


@pytest.mark.parametrize(("size", "rows", "form", "dtype"), halved(GATES, ROWS, FORMATS, DTYPES, rest=LATER), ids=str)
def test_gates(size, rows, form, dtype):
    K, N = size * 4, 20 if INTERPRETED else 700
    x, gate = normal(rows, K, dtype=dtype), normal(rows, K, dtype=dtype)
    a, b = quantised(N, K, form), Quantised(*(t.flip(0) for t in quantised(N, K, form)))
    for shape in ((size,), (4, size)):
        norm = Norm(normal(*shape, dtype=dtype), 1e-5, size, gate)
        compare(dtype, x, [a], [None], norm=norm, residual=normal(rows, N, dtype=dtype))
    for biases in ([None, None], [normal(N, dtype=dtype), None]):
        compare(dtype, x, [a, b], biases, norm=Norm(normal(K, dtype=dtype), 1e-5, K), gated=True)
        compare(dtype, x, [a, b], biases[::-1], gated=True)
    compare(dtype, x, [a, normal(N, K, dtype=dtype)], [None, None], gated=True)


@pytest.mark.parametrize("form", [*FORMATS, Format("int4", 128)], ids=str)
def test_every_code_and_no_rounding_of_sums(form):
    """Integers are exact, with every code and a different scale per group, for any number of vectors."""
    K, N = 256, 33
    draw = torch.Generator().manual_seed(0)
    if form.to == "int8":
        w = Quantised(torch.randint(-128, 128, (N, K), dtype=torch.int8, generator=draw), torch.arange(1.0, N + 1))
    else:
        w = Quantised(
            torch.randint(256, (N, K // 2), dtype=torch.uint8, generator=draw),
            torch.randint(1, 9, (N, K // form.group), generator=draw).half(),
        )
    w = Quantised(*(t.to(DEVICE) for t in w))
    for rows in (1, 2):
        x = torch.randint(-2, 3, (rows, K), generator=draw).float().to(DEVICE)
        (got,) = gpu.linears(x, [w], [None], None, None, False, ())
        wanted = x.double() @ dequantised(*w, torch.float64).T
        assert (got.double() - wanted).abs().max() <= (2e-3 if rows == 1 else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rows(form, dtype):
    w, ids = quantised(40, 96 if INTERPRETED else 2816, form), torch.tensor([[3, 39], [0, 3]], device=DEVICE)
    with poisoned():
        assert torch.equal(gpu.rows(w, ids, dtype), dequantised(w.codes[ids], w.scale[ids], dtype))


def test_refusals():
    x, w = normal(2, 64), quantised(8, 64, FORMATS[1])
    assert gpu.refusal(x, w, quantised(8, 64, FORMATS[0])) is None
    for why, call in {
        "at most": (normal(300, 64), w), "32 bits": (x.double(), w), "one group": (x, w, quantised(8, 64, FORMATS[2])),
        "contiguous": (x, Quantised(*(t[::2] for t in w))),
    }.items():  # fmt: skip
        assert why in gpu.refusal(*call)
