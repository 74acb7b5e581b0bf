"""The kernels of ``diagonal_scan`` and ``running_max``: on a GPU, or on a CPU under Triton's interpreter with small tiles."""

import os

import pytest
import torch
from torch import Tensor

import linattn
from linattn.ops.reference import scan as reference
from tests.ops.errors import error
from tests.ops.triton.scans import LENGTHS, LIMIT, check_replays

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs an NVIDIA GPU, or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = [pytest.mark.gpu] if GPU else []
SLOW = [] if GPU else [pytest.mark.slow]

KINDS = ("sum", "maximum")


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """Tiles so small that few tokens fill several groups of them."""
    from linattn.ops.triton import scan

    if not GPU:
        from tests.ops.triton import interpreter  # noqa: F401

        monkeypatch.setattr(scan, "config", lambda *_: scan.Config(span=2, spans=2, channels=8, stages=1, programs=2))


def arguments(
    device: str,
    T: int = 13,
    B: int = 2,
    D: int = 5,
    *,
    rank: str = "BTD",
    dtype=torch.float32,
    N: int | None = None,
    strength: float = 0.3,
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(T + D)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    shape = (D,) if rank == "D" else (B, T, D)
    decay = -normal(*shape).abs() * strength
    if rank != "D":
        decay = torch.where(torch.rand(shape, generator=random) < 0.05, -torch.inf, decay)
    a = {"decay": decay, "x": normal(B, T, D).to(dtype), "initial": normal(N or B, D)}
    return {name: t.to(device) for name, t in a.items()}


def door(kind: str, a: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    function = linattn.diagonal_scan if kind == "sum" else linattn.running_max
    return function(a["decay"], a["x"], initial_state=a.get("initial"), return_state=True, backend="triton", **options)


def definition(kind: str, a: dict[str, Tensor], cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows = a["x"].shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    initial = a.get("initial", a["x"].new_full((rows, a["x"].shape[2]), 0.0 if kind == "sum" else -torch.inf))
    step = reference.decayed_sum if kind == "sum" else reference.decayed_max
    return reference.scan(step, a["decay"].expand(a["x"].shape), a["x"], initial, cu_seqlens)


def results(function, kind: str, a: dict[str, Tensor], **options) -> list[Tensor]:
    """Values, and gradients of weighted sums of all the finite ones."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in a.items()}
    values = function(kind, leaves, **options)
    random = torch.Generator().manual_seed(1)
    weights = [torch.randn(v.shape, generator=random, dtype=torch.float64).to(v) for v in values]
    weights = [torch.where(v.isfinite(), w, 0.0) for v, w in zip(values, weights, strict=True)]
    return [*values, *torch.autograd.grad(values, list(leaves.values()), weights, materialize_grads=True)]


def check(kind: str, a: dict[str, Tensor], **options) -> None:
    mine = results(door, kind, a, **options)
    wanted = results(definition, kind, {name: t.double() for name, t in a.items()}, **options)
    for limit, m, w in zip((*LIMIT[a["x"].dtype][:1] * 2, *LIMIT[a["x"].dtype][1:] * 3), mine, wanted, strict=False):
        assert torch.equal(m.double()[~w.isfinite()], w[~w.isfinite()])
        assert error(m[w.isfinite()], w[w.isfinite()], floor=1e-30) <= limit


@pytest.mark.parametrize("T", [1, pytest.param(6, marks=SLOW), 9] + [130, 1000, 5000, 20000] * GPU)
@pytest.mark.parametrize("rank", ["BTD", "D"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, rank, T, device):
    check(kind, arguments(device, T, rank=rank))


@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * GPU)
@pytest.mark.parametrize("D", [9] + [8, 64, 2048] * GPU)
@pytest.mark.parametrize("kind", KINDS)
def test_halves(kind, D, dtype, device):
    check(kind, arguments(device, 6, 1, D, dtype=dtype))


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("rank", ["BTD", pytest.param("D", marks=SLOW)])
@pytest.mark.parametrize("kind", KINDS)
def test_packed(kind, rank, initial, device):
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], device=device)
    a = arguments(device, sum(LENGTHS), 1, rank=rank, N=len(LENGTHS))
    if not initial:
        del a["initial"]
    check(kind, a, cu_seqlens=cu)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_initial_state(kind, device):
    a = arguments(device, 9, 1)
    del a["initial"]
    check(kind, a)


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 4, 5), (2, 4, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_do(kind, shape, device):
    B, T, D = shape
    a = arguments(device, T, B, D)
    for mine, wanted in zip(results(door, kind, a), results(definition, kind, a), strict=True):
        assert torch.equal(mine, wanted)


def test_ties_share_the_gradient(device):
    a = {"decay": torch.tensor([-1.0, 0.0]), "x": torch.zeros(1, 20, 2), "initial": torch.zeros(1, 2)}
    a["x"][0, 5] = -torch.inf
    check("maximum", {name: t.to(device) for name, t in a.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_strong_and_weak_decays(kind, device):
    for strength in (1e-5, 800.0):
        check(kind, arguments(device, 6, 1, strength=strength))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_before_a_reset_changes_a_bit_after_it(kind, device):
    a = arguments(device, 7, 1)
    for at in (1, 5):
        a["decay"][:, at] = -torch.inf
        other = {name: t.clone() for name, t in a.items()}
        other["x"][:, :at] *= 1e6
        other["initial"] *= -1e6
        (h, s), (g, r) = door(kind, a), door(kind, other)
        assert torch.equal(h[:, at:], g[:, at:]) and torch.equal(s, r) and not torch.equal(h[:, :at], g[:, :at])


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_sequence_and_channel(kind, device):
    cu = torch.tensor([0, 4, 4, 9, 13], device=device)
    a = arguments(device, 13, 1, N=4)
    h, s = door(kind, a, cu_seqlens=cu)
    a["x"][0, 5, 3] = torch.nan
    a["decay"][0, 6:9, 3] = -0.1
    g, r = door(kind, a, cu_seqlens=cu)
    seen = torch.zeros_like(h, dtype=torch.bool)
    seen[0, 5:9, 3] = True
    assert torch.equal(g[~seen], h[~seen]) and g[seen].isnan().all()
    assert r[2, 3].isnan() and torch.equal(r[[0, 1, 3]], s[[0, 1, 3]])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=SLOW) for kind in KINDS])
def test_the_same_bits_twice(kind, device):
    a = arguments(device, *((3000, 1, 2048) if GPU else (9, 1)))
    for one, two in zip(results(door, kind, a), results(door, kind, a), strict=True):
        assert torch.equal(one, two)


def test_the_gradient_of_a_decay_that_wants_none(device):
    a = arguments(device, 6, 1)
    x = a["x"].clone().requires_grad_()
    h, _ = door("sum", {**a, "x": x})
    wanted = results(door, "sum", a)
    (mine,) = torch.autograd.grad(h.sum(), x)
    assert mine.shape == x.shape and torch.equal(h, wanted[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("of", ["values", "last states"])
@pytest.mark.parametrize("kind", ["sum", pytest.param("maximum", marks=SLOW)])
def test_the_gradient_of_one_result(kind, of, packed, device):
    cu = torch.tensor([0, 0, 2, 5], device=device) if packed else None
    gradients = []
    for function, dtype in ((door, torch.float32), (definition, torch.float64)):
        a = {name: t.to(dtype).requires_grad_() for name, t in arguments(device, 5, 1, N=3 if packed else 1).items()}
        y = function(kind, a, cu_seqlens=cu)[of == "last states"]
        gradients.append(torch.autograd.grad(torch.where(y.isfinite(), y, 0.0).square().sum(), list(a.values()), materialize_grads=True))
    for mine, wanted in zip(*gradients, strict=True):
        assert error(mine, wanted, floor=1e-30) <= 1e-5


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_operators(kind, packed, device):

    a = arguments(device, 3, 1, 3)
    cu = torch.tensor([0, 3], device=device) if packed else None
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    leaves = [t.clone().requires_grad_() for t in a.values()]
    torch.library.opcheck(torch.ops.linattn.elementwise_forward.default, (kind, *leaves, cu), test_utils=tests)


@pytest.mark.parametrize("kind", KINDS)
def test_full_graph(kind, device):
    torch._dynamo.reset()
    a = arguments(device, 6, 1)
    compiled = torch.compile(door, fullgraph=True, backend="aot_eager")
    for mine, wanted in zip(results(compiled, kind, a), results(door, kind, a), strict=True):
        assert torch.equal(mine, wanted)
    torch._dynamo.reset()


def test_gradients_of_gradients_are_refused(device):
    a = {name: t.requires_grad_() for name, t in arguments(device, 5).items()}
    h, _ = door("sum", a)
    (g,) = torch.autograd.grad(h.square().sum(), a["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        torch.autograd.grad(g.square().sum(), a["x"])


@pytest.mark.parametrize(
    ("change", "words"), [({"x": torch.zeros(1, 9, 5).double()}, "float64"), ({"decay": torch.zeros(5, dtype=torch.complex64)}, "complex")]
)
def test_what_the_kernels_do_not_run_goes_to_the_portable_form_or_is_refused(change, words, device):
    a = {name: t.to(device) for name, t in {"decay": torch.zeros(5), "x": torch.zeros(1, 9, 5), **change}.items()}
    with pytest.raises(ValueError, match=f"triton.*{words}"):
        linattn.diagonal_scan(a["decay"], a["x"], backend="triton")
    assert linattn.diagonal_scan(a["decay"], a["x"]).shape == (1, 9, 5)


@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
def test_captured_in_a_graph():
    a = {name: t.requires_grad_() for name, t in arguments("cuda", 1000).items()}
    results(door, "sum", a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h, s = door("sum", a)
        grads = torch.autograd.grad(h.sum() + s.sum(), list(a.values()))
    check_replays(graph, (h, s, *grads))
    assert torch.equal(h, door("sum", a)[0])
