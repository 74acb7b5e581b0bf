"""Chains of linear maps in one launch, on a Hopper, against their definition in float64: what lies between links is rounded in both."""

import pytest
import torch

from linattn.ops.linears import chained
from linattn.ops.triton import launch
from tests.ops.errors import error
from tests.ops.triton.device import DEVICE, INTERPRETED, poisoned

if INTERPRETED:
    pytest.skip("Gluon is not interpreted", allow_module_level=True)
from linattn.ops.triton import chain


@pytest.fixture(autouse=True)
def hopper():
    if launch.capability(torch.device(DEVICE, 0)) < (9, 0):
        pytest.skip("needs a Hopper")


LIMIT = {torch.float16: 3e-3, torch.bfloat16: 2.5e-2}  # of a map 1e-3 and 8e-3, and a chain has four
SHAPES = [  # channels of the residual stream, of what the first link reads and of the feed-forward, sizes of the last link, of a head
    (1024, 1024, 2816, (512, 512, 1024, 1024, 512), 256),
    (1024, 1536, 2752, (1536, 1536, 6, 6, 1536), 128),
    (2048, 2048, 5632, (32000,), 2048),
    (64, 128, 72, (50, 3), 16),
    (2560, 4096, 10240, (4096, 17), 64),
    (256, 8, 264, (1,), 0),
]


def normal(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(DEVICE, dtype)


def block(shape, dtype, bias=False):
    """x and links: what a layer of a model does behind its recurrence, and the maps of the next one."""
    D, V, F, sizes, size = shape

    def weight(n, k, seed):
        return (normal(n, k, dtype=torch.float32, seed=seed) / k**0.5).to(dtype)

    def maybe(n, seed):
        return normal(n, dtype=dtype, seed=seed) if bias else None

    first = {"norm": normal(size, dtype=dtype, seed=1), "eps": 1e-5, "size": size, "gate": normal(1, V, dtype=dtype)} if size else {}
    steps = [[("log_sigmoid", None), ("div", 16.0)], [("add", normal(sizes[0], dtype=torch.float32)), ("softplus", None)]]
    finish = [[], *[[]] * (len(sizes) - 2), steps[0]] if len(sizes) > 1 else steps[1:]
    norm = {"norm": normal(D, dtype=dtype, seed=2), "eps": 1e-6, "size": D}
    links = [
        ([weight(D, V, 3)], [maybe(D, 1)], {**first, "residual": normal(1, D, dtype=dtype, seed=4)}),
        ([weight(F, D, 5), weight(F, D, 6)], [maybe(F, 2), maybe(F, 3)], {**norm, "gated": True}),
        ([weight(D, F, 7)], [None], {"residual": 0}),
        ([weight(n, D, 8 + i) for i, n in enumerate(sizes)], [maybe(n, 4 + i) if i % 2 else None for i, n in enumerate(sizes)],
         {**norm, "finish": finish}),
    ]  # fmt: skip
    return normal(1, V, dtype=dtype, seed=9), links


def wide(x, links):
    def of(value):
        if isinstance(value, torch.Tensor):
            return value.double()
        return type(value)(map(of, value)) if isinstance(value, (list, tuple)) else value

    return of(x), [(of(weights), of(biases), {n: of(v) for n, v in options.items()}) for weights, biases, options in links]


def kept(links):
    return torch.zeros(chain.room(links, torch.device("cuda", 0)), dtype=torch.int32, device=DEVICE)


def check(got, wanted, dtype):
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        for j, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a.shape == b.shape and a.dtype in (dtype, torch.float32)
            assert error(a.double(), b) <= LIMIT[dtype], (i, j)


@pytest.mark.parametrize("dtype", list(LIMIT))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks(shape, bias, dtype):
    x, links = block(shape, dtype, bias)
    wanted = chained(*wide(x, links))
    assert chain.refusal(x, links) is None
    for count in (2, 3, 4):
        some = kept(links[:count])
        with poisoned():
            runs = [chain.chained(x, links[:count], some) for _ in range(3)]
        for run in runs:
            check(run, wanted[:count], dtype)
            assert all(torch.equal(a, b) for mine, theirs in zip(run, runs[0], strict=True) for a, b in zip(mine, theirs, strict=True))


def test_heads_of_no_eps_end_with_the_vector():
    """Behind the last of them a tile has room for others, of zeros, whose length would be 0."""
    x, links = block(SHAPES[1], torch.bfloat16)
    weights, _, options = links[0]
    links = [(weights, [normal(2 * weights[0].shape[0], dtype=torch.bfloat16)[::2]], options | {"eps": 0.0}), *links[1:]]
    check(chain.chained(x, links, kept(links)), chained(*wide(x, links)), torch.bfloat16)


def test_counts_come_round():
    """The count of the launch has 16 bits."""
    x, links = block(SHAPES[3], torch.bfloat16)
    some, wanted = kept(links), chained(*wide(x, links))
    some[: torch.cuda.get_device_properties(0).multi_processor_count] = 65534
    for i in range(1, 5):
        other = x * i
        check(chain.chained(other, links, some), chained(*wide(other, links)), torch.bfloat16)
    assert len(wanted) == 4


def test_vectors_change_from_launch_to_launch():
    """A hundred launches in a graph, each of a vector of its own: none takes a word of the one before."""
    x, links = block(SHAPES[0], torch.bfloat16)
    some, xs = kept(links), [normal(1, x.shape[1], dtype=torch.bfloat16, seed=100 + i) for i in range(20)]
    alone = [[t.clone() for t in chain.chained(one, links, some)[-1]] for one in xs]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            got = [chain.chained(one, links, some)[-1] for one in xs]
        for _ in range(5):
            graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for mine, theirs in zip(got, alone, strict=True) for a, b in zip(mine, theirs, strict=True))


def test_refusals():
    x, links = block(SHAPES[3], torch.bfloat16)
    assert chain.refusal(x.float(), links) is not None
    assert chain.refusal(x.expand(2, -1), links) is not None
    weights, biases, options = links[0]
    assert "aligned" in str(chain.refusal(x[:, :100], [([weights[0][:, :100].contiguous()], biases, {}), *links[1:]]))
    assert "power of two" in str(chain.refusal(x[:, :96], [([weights[0][:, :96].contiguous()], biases, options | {"size": 48})]))
    assert "several results" in str(chain.refusal(x, [(weights * 2, biases * 2, {}), *links[1:]]))
    assert "gate" in str(chain.refusal(x, [links[0], ([weights[0][:, :64].contiguous()], biases, {"gate": x[:, :64]})]))
