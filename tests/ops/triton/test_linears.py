"""The kernels of linear maps with what stands around them, against their definition in float64."""

import pytest
import torch

from linattn.ops import linears as door
from linattn.ops.triton import linears as gpu
from tests.ops.errors import error
from tests.ops.triton.device import DEVICE, DTYPES, INTERPRETED, poisoned

LIMIT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = [(24, (5, 17, 9))] if INTERPRETED else [(1024, (512, 512, 1024, 16)), (2752, (1000,)), (16, (512, 3)), (70, (70,))]
ROWS = [1, 3] if INTERPRETED else [1, 2, 17, 64, 200]


def normal(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def compare(dtype, x, weights, biases, **options):
    assert gpu.refusal(x, weights) is None
    defaults = {"norm": None, "eps": 0.0, "size": 0, "gate": None, "residual": None, "gated": False, "finish": ()}
    with poisoned():
        got = gpu.linears(x, weights, biases, **{**defaults, **options})
    wide = {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in options.items()}
    wide["finish"] = [[(n, c.double() if isinstance(c, torch.Tensor) else c) for n, c in f] for f in options.get("finish", ())]
    wanted = door.linears(x.double(), [w.double() for w in weights], [None if b is None else b.double() for b in biases], **wide)
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        wanted_dtype = torch.float32 if wide["finish"][i : i + 1] not in ([], [[]]) else dtype
        assert mine.shape == theirs.shape and mine.dtype == wanted_dtype and mine.is_contiguous()
        assert error(mine.double(), theirs) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("K", "outputs"), SIZES)
def test_products(K, outputs, rows, dtype):
    x, weights = normal(rows, 1, K, dtype=dtype), [normal(n, K, dtype=dtype) for n in outputs]
    biases = [normal(n, dtype=dtype) if i % 2 else None for i, n in enumerate(outputs)]
    compare(dtype, x, weights, biases)
    compare(dtype, x, weights, biases, norm=normal(K, dtype=dtype), eps=1e-5, size=K)
    compare(dtype, x, weights[:1], biases[:1], residual=normal(rows, 1, outputs[0], dtype=dtype), eps=1e-5, size=K)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [8, 6] if INTERPRETED else [128, 96])
def test_gates(size, rows, dtype):
    K, N = size * 3, 20 if INTERPRETED else 700
    x, gate = normal(rows, K, dtype=dtype), normal(rows, K, dtype=dtype)
    a, b = normal(N, K, dtype=dtype), normal(N + 1, K, dtype=dtype)[1:]
    for shape in ((size,), (3, size)):
        compare(
            dtype, x, [a], [None], norm=normal(*shape, dtype=dtype), eps=1e-5, size=size, gate=gate, residual=normal(rows, N, dtype=dtype)
        )
    compare(dtype, x, [a, b], [None, None], norm=normal(K, dtype=dtype), eps=1e-5, size=K, gated=True)
    compare(dtype, x, [a, b], [None, None], gated=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_finishes(rows, dtype):
    K, sizes = (24, (5, 17, 9)) if INTERPRETED else (256, (512, 700, 16))
    x, weights = normal(rows, K, dtype=dtype) / 4, [normal(n, K, dtype=dtype) for n in sizes]
    vector = normal(sizes[2], dtype=torch.float32)
    steps = [
        [[("log_sigmoid", None), ("div", 16.0)], [], [("add", vector), ("softplus", None), ("mul", vector), ("neg", None)]],
        [[], [("sigmoid", None)], [("tanh", None), ("add", 0.5), ("exp", None)]],
    ]
    for finish in steps:
        compare(dtype, x, weights, [None, normal(sizes[1], dtype=dtype), None], finish=finish)
