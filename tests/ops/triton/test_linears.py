"""The kernels of linear maps with fused neighbours, against their definition in float64."""

import pytest
import torch

from linattn.ops import linears as door
from linattn.ops.torch.linears import Norm
from linattn.ops.triton import linear_tiles
from linattn.ops.triton import linears as gpu
from linattn.ops.triton.linear_tiles import Tiles
from tests.ops.errors import doubled, error
from tests.ops.triton.device import DEVICE, DTYPES, INTERPRETED, poisoned

LIMIT = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIZES = [(24, (5, 17, 9))] if INTERPRETED else [(1024, (512, 512, 1024, 16)), (2752, (1000,)), (16, (512, 3)), (70, (70,))]
ROWS = [1, 3] if INTERPRETED else [1, 2, 17, 64, 200]


def normal(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def run(x, weights, biases, counters=None, **options):
    assert gpu.refusal(x, *weights) is None
    defaults = {"norm": None, "residual": None, "gated": False, "finish": ()}
    with poisoned():
        return gpu.linears(x, weights, biases, **{**defaults, **options}, counters=counters)


def compare(dtype, x, weights, biases, counters=None, **options):
    got = run(x, weights, biases, counters, **options)
    finish = options.get("finish", ())
    wanted = door.linears(*doubled((x, weights, biases)), **doubled(options))
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        wanted_dtype = torch.float32 if i < len(finish) and finish[i] else dtype
        assert mine.shape == theirs.shape and mine.dtype == wanted_dtype and mine.is_contiguous()
        assert error(mine.double(), theirs) <= LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("K", "outputs"), SIZES)
def test_products(K, outputs, rows, dtype):
    x, weights = normal(rows, 1, K, dtype=dtype), [normal(n, K, dtype=dtype) for n in outputs]
    biases = [normal(2 * n, dtype=dtype)[::2] if i % 2 else None for i, n in enumerate(outputs)]
    compare(dtype, x, weights, biases)
    compare(dtype, torch._neg_view(-x), [torch._neg_view(-w) for w in weights], biases)
    compare(dtype, x, weights, biases, norm=Norm(normal(K, dtype=dtype), 1e-5, K))
    compare(dtype, x, weights[:1], biases[:1], residual=normal(rows, 1, outputs[0], dtype=dtype), norm=Norm(None, 1e-5, K))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [8, 6] if INTERPRETED else [128, 96])
def test_gates(size, rows, dtype):
    K, N = size * 3, 20 if INTERPRETED else 700
    x, gate = normal(rows, K, dtype=dtype), normal(rows, K, dtype=dtype)
    a, b = normal(N, K, dtype=dtype), normal(N + 1, K, dtype=dtype)[1:]
    for shape in ((size,), (3, size)):
        norm = Norm(normal(*shape, dtype=dtype), 1e-5, size, gate)
        compare(dtype, x, [a], [None], norm=norm, residual=normal(rows, N, dtype=dtype))
    for biases in ([None, None], [normal(N, dtype=dtype), None], [normal(N, dtype=dtype), normal(N, dtype=dtype)]):
        compare(dtype, x, [a, b], biases, norm=Norm(normal(K, dtype=dtype), 1e-5, K), gated=True)
        compare(dtype, x, [a, b], biases[::-1], gated=True)


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


COUNTERS = 256  # at most 176 tiles in these tests
# Tiles whose programs share channels: evenly, or with fewer blocks for the last; rows with whole blocks, or a remainder.
SHARED = [Tiles(16, 16, 8, 3, 4, 2), Tiles(16, 16, 8, 2, 4, 2)]
if not INTERPRETED:
    SHARED = [Tiles(64, 64, 64, 4, 4, 3), Tiles(128, 64, 64, 2, 4, 3), Tiles(16, 64, 128, 3, 4, 3)]


@pytest.fixture(params=SHARED, ids=str)
def counters(request, monkeypatch):
    """Pass counters in every call, for tiles shared by several programs."""

    def chosen(vectors, K, sizes, *_, **__):
        across, along, _ = request.param.grid(vectors, sizes)
        assert across * along <= COUNTERS
        return request.param

    monkeypatch.setattr(linear_tiles, "choose", chosen)
    return torch.zeros(COUNTERS, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 17] if INTERPRETED else [2, 3, 17, 64, 100, 256])
@pytest.mark.parametrize("K", [24, 20] if INTERPRETED else [1024, 1000])
def test_programs_that_share_channels(K, rows, dtype, counters):
    """Counters are reset to zero after each call; poisoned memory reveals unwritten parts."""
    sizes = (5, 17, 9) if INTERPRETED else (300, 128, 17)
    x, weights = normal(rows, K, dtype=dtype), [normal(n, K, dtype=dtype) for n in sizes]
    biases = [None, normal(sizes[1], dtype=dtype), None]
    finish = [[("sigmoid", None), ("mul", 2.0)], [], [("add", normal(sizes[2], dtype=torch.float32))]]
    for _ in range(2):
        compare(dtype, x, weights, biases, counters, finish=finish)
        compare(dtype, x, weights[1:2], biases[1:2], counters, residual=normal(rows, sizes[1], dtype=dtype))
        others = [None, normal(sizes[0], dtype=dtype)]
        compare(dtype, x, [weights[0], normal(sizes[0] + 1, K, dtype=dtype)[1:]], others, counters, gated=True)
        assert not counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_are_equal_bit_for_bit(dtype, counters):
    """The order of sums does not depend on the order of programs."""
    K, N, rows = (40, 20, 5) if INTERPRETED else (2816, 1024, 64)
    x, weights = normal(rows, K, dtype=dtype), [normal(N, K, dtype=dtype)]
    first = run(x, weights, [None], counters)[0]
    for _ in range(2 if INTERPRETED else 200):
        assert torch.equal(run(x, weights, [None], counters)[0], first)


@pytest.mark.skipif(INTERPRETED, reason="graphs are CUDA's")
def test_a_graph_of_calls_that_follow_one_another(counters):
    """Each overlaps with the previous one where possible, and uses the same counters."""
    down, up = normal(1024, 2816, dtype=torch.float16) / 32, normal(2816, 1024, dtype=torch.float16) / 32
    norm = normal(1024, dtype=torch.float16)
    x = normal(64, 1024, dtype=torch.float16)

    def layers(x):
        for _ in range(20):
            (wide,) = run(x, [up], [None], counters, norm=Norm(norm, 1e-5, 1024))
            (x,) = run(wide, [down], [None], counters, residual=x)
        return x

    wanted = layers(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(x)
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, wanted)
    assert not counters.any() and got.isfinite().all()


@pytest.mark.parametrize("shared", [99 * 1024, 163 * 1024, 227 * 1024])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("vectors", [2, 17, 64, 100, 256, 1000])
def test_the_chosen_tiles(vectors, itemsize, gated, shared):
    """Every program has channels, loads fit into shared memory, and counters suffice."""
    for K, sizes in [(1024, (512, 512, 1024, 1024)), (2816, (1024,)), (16, (512, 3)), (1000, (32000,))]:
        tiles = linear_tiles.choose(vectors, K, sizes, itemsize, gated=gated, counters=COUNTERS, shared=shared)
        blocks = -(-K // tiles.BK)
        assert (tiles.SPLIT - 1) * -(-blocks // tiles.SPLIT) < blocks
        across, along, split = tiles.grid(vectors, sizes)
        assert split == 1 or across * along <= COUNTERS
        assert (tiles.BM + tiles.BN * (1 + gated)) * tiles.BK * itemsize * tiles.num_stages <= shared
        assert linear_tiles.choose(vectors, K, sizes, itemsize, gated=gated, counters=0, shared=shared).SPLIT == 1
