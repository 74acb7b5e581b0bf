"""The short convolution whose heads of queries and keys have unit length, against its definition in float64."""

import pytest
import torch

from linattn.ops.triton import short_convolution as gpu
from linattn.ops.unit_convolution import KERNELS, portable
from tests.ops.errors import error
from tests.ops.triton.device import DEVICE, DTYPES, INTERPRETED, poisoned

LIMIT = {torch.float32: (1e-5, 1e-5), torch.float16: (0.0006, 0.0012), torch.bfloat16: (0.004, 0.008)}  # of values, of gradients
HEAD = 16 if INTERPRETED else 128
SHAPES = [(5, (1, 1, 2)), (11, (2, 1, 1))] if INTERPRETED else [(1, (1, 1, 1)), (300, (2, 1, 3)), (4096, (8, 8, 16))]  # T, heads


@pytest.fixture(autouse=INTERPRETED)
def short_segments(monkeypatch):
    monkeypatch.setattr(gpu, "FORWARD", gpu.Config(channels=16, warps=1, tokens=2, groups=2))
    monkeypatch.setattr(gpu, "BACKWARD", gpu.Config(channels=16, warps=1, tokens=2, groups=5))


def arguments(tokens, heads, dtype=torch.float32, bias=True, before=True):
    random, width = torch.Generator().manual_seed(tokens), sum(heads) * HEAD
    made = (
        {"x": (2, tokens, width)}
        | ({"before": (2, 3, width)} if before else {})
        | {"weight": (width, 1, 4)}
        | ({"bias": (width,)} if bias else {})
    )
    return {name: torch.randn(shape, generator=random).to(DEVICE, dtype) for name, shape in made.items()}


def results(a, heads, function, wanted=(True, True, True)):
    leaves = {name: t.detach().requires_grad_() for name, t in a.items()}
    sizes = tuple(n * HEAD for n in heads)
    with poisoned():
        found = [t.flatten(2) for t in function(leaves["x"], leaves.get("before"), leaves["weight"], leaves.get("bias"), sizes)]
        random = torch.Generator().manual_seed(1)
        weights = [torch.randn(t.shape, generator=random).bfloat16().to(t) for t in found]
        loss = sum((t * w).sum() for t, w, used in zip(found, weights, wanted, strict=True) if used)
        return [*found, *torch.autograd.grad(loss, list(leaves.values()))]


def kernels(x, before, weight, bias, sizes):
    return KERNELS(x, before, weight, bias, *sizes[:2], 1e-6)


def definition(x, before, weight, bias, sizes):
    return portable(x, before, weight, bias, sizes, HEAD)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [(True, True), (False, False)], ids=["bias, before", "neither"])
@pytest.mark.parametrize(("tokens", "heads"), SHAPES)
def test_values_and_gradients(tokens, heads, more, dtype):
    a = arguments(tokens, heads, dtype, *more)
    mine, wanted = results(a, heads, kernels), results({n: t.double() for n, t in a.items()}, heads, definition)
    for i, (m, w) in enumerate(zip(mine, wanted, strict=True)):
        assert m.dtype == dtype and m.is_contiguous() and error(m, w) <= LIMIT[dtype][i > 2], i


@pytest.mark.parametrize("used", [(True, False, True), (False, True, False)], ids=str)
def test_results_that_nobody_reads(used):
    tokens, heads = SHAPES[1]
    a = arguments(tokens, heads)
    mine, wanted = results(a, heads, kernels, used), results({n: t.double() for n, t in a.items()}, heads, definition, used)
    assert all(error(m, w) <= 1e-5 for m, w in zip(mine, wanted, strict=True))


def test_the_operators_results_without_memory():
    tokens, heads = SHAPES[0]
    a = {n: t.requires_grad_() for n, t in arguments(tokens, heads).items()}
    given = (a["x"], a["before"], a["weight"], a["bias"], heads[0] * HEAD, heads[1] * HEAD, 1e-6)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(KERNELS.registered[0], given, test_utils=tests)
    d = [t.detach() for t in KERNELS(*given)]
    torch.library.opcheck(
        KERNELS.registered[1], (*d, *(t.detach() if isinstance(t, torch.Tensor) else t for t in given)), test_utils=tests[::2]
    )
