"""The kernels of ``selective_scan``: on a GPU, or on a CPU under Triton's interpreter with small tiles."""

import os

import pytest
import torch
from torch import Tensor

from linattn.ops.reference.selective_scan import selective_scan as reference
from linattn.ops.selective_scan import KERNELS
from linattn.ops.torch.selective_scan import selective_scan as portable
from tests.ops.errors import error
from tests.ops.triton.scans import LENGTHS, LIMIT, check_replays

pytest.importorskip("triton")
GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs an NVIDIA GPU, or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = [pytest.mark.gpu] if GPU else []
SLOW = [] if GPU else [pytest.mark.slow]

NAMES = ("x", "dt", "a", "b", "c", "d", "initial")
FILLED = torch.utils.deterministic.fill_uninitialized_memory


def run(*arguments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and last states by the kernels."""
    y, last, _ = KERNELS["triton"](*arguments)
    return y, last


@pytest.fixture(autouse=True)
def scan(monkeypatch):
    """The module, with tiles and segments so small that few tokens fill several, and new memory full of NaN."""
    from linattn.ops.triton import selective_scan

    if not GPU:
        from tests.ops.triton import interpreter  # noqa: F401

        for name in ("ENDS", "FORWARD", "BACKWARD"):
            monkeypatch.setattr(selective_scan, name, getattr(selective_scan, name)._replace(tokens=4))
        monkeypatch.setattr(selective_scan, "APART", 8)
        monkeypatch.setattr(selective_scan, "HELD", 2)
        monkeypatch.setattr(selective_scan, "HELD_AGAIN", 1)
        monkeypatch.setattr(selective_scan, "PACKED", 1)
    assert FILLED
    torch.use_deterministic_algorithms(True)
    yield selective_scan
    torch.use_deterministic_algorithms(False)


def arguments(device, T=13, B=2, D=5, N=3, *, rows=None, strength=0.5, dtype=torch.float32, rest=torch.float32) -> dict[str, Tensor | None]:
    random = torch.Generator().manual_seed(T + D)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    dt = normal(B, T, D).abs() * strength
    dt = torch.where(torch.rand(dt.shape, generator=random) < 0.05, 0.0, dt)
    a = {"x": normal(B, T, D).to(dtype), "dt": dt.to(rest), "a": -normal(D, N).abs()}
    a |= {"b": normal(B, T, N).to(rest), "c": normal(B, T, N).to(rest), "d": normal(D), "initial": normal(rows or B, D, N)}
    return {name: t.to(device) for name, t in a.items()}


def definition(x, dt, a, b, c, d, initial, cu_seqlens):
    rows = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    initial = x.new_zeros(rows, *a.shape) if initial is None else initial
    y, last = (portable if GPU else reference)(x, dt, a, b, c, initial, cu_seqlens)
    return (y if d is None else y + d * x), last


def results(function, a: dict[str, Tensor | None], cu=None, weights=None) -> dict[str, Tensor]:
    """Values, and gradients of their sums with ``weights``, or random ones."""
    leaves = {name: None if t is None else t.detach().clone().requires_grad_() for name, t in a.items()}
    values = function(*leaves.values(), cu)
    random = torch.Generator().manual_seed(1)
    weights = weights or [torch.randn(v.shape, generator=random, dtype=torch.float64).to(v) for v in values]
    given = {name: t for name, t in leaves.items() if t is not None}
    gradients = torch.autograd.grad(values, list(given.values()), weights, materialize_grads=True)
    return dict(zip(("y", "last"), values, strict=True)) | {f"gradient of {n}": g for n, g in zip(given, gradients, strict=True)}


def check(scan, a: dict[str, Tensor | None], cu=None) -> None:
    mine = results(run, a, cu)
    wanted = results(definition, {name: None if t is None else t.double() for name, t in a.items()}, cu)
    assert mine["y"].dtype == a["x"].dtype and mine["last"].dtype == torch.float32
    of_values, of_gradients = LIMIT[a["x"].dtype]
    for name, w in wanted.items():
        limit = of_gradients if name.startswith("gradient") else 1e-5 if name == "last" else of_values
        assert error(mine[name], w, floor=1e-30) <= limit, name
    for name in (n for n in NAMES if a[n] is not None):
        gradient = mine[f"gradient of {name}"]
        assert gradient.dtype == a[name].dtype and gradient.shape == a[name].shape


@pytest.mark.parametrize("T", [1, pytest.param(4, marks=SLOW), 9] + [63, 64, 130, 1000, 5000] * GPU)
@pytest.mark.parametrize("N", [1, pytest.param(3, marks=SLOW)] + [16, 64] * GPU)
def test_values_and_gradients(T, N, scan, device):
    check(scan, arguments(device, T, N=N))


@pytest.mark.parametrize("D", [70, pytest.param(64, marks=SLOW)] + [2048] * GPU)
def test_many_channels(D, scan, device):
    check(scan, arguments(device, 6, 1, D, N=16 if GPU else 2))


@pytest.mark.parametrize("rest", [torch.float32, "the same"])
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * GPU)
def test_halves(dtype, rest, scan, device):
    check(scan, arguments(device, 9, dtype=dtype, rest=dtype if rest == "the same" else rest))


@pytest.mark.parametrize("initial", [True, False])
def test_packed(initial, scan, device):
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], device=device)
    a = arguments(device, sum(LENGTHS), 1, rows=len(LENGTHS))
    check(scan, a if initial else {**a, "initial": None}, cu)


@pytest.mark.skipif(not GPU, reason="long")
def test_packed_across_segments(scan, device):
    cu = torch.tensor([0, 0, 700, 701, 2999, 3000, 3000], device=device, dtype=torch.int32)
    check(scan, arguments(device, 3000, 1, 96, 16, rows=6, strength=0.05), cu)


def test_few_states_are_saved(scan, device):
    a = arguments(device, 2 * scan.APART + 1)
    assert KERNELS["triton"](*(t.requires_grad_() for t in a.values()), None)[2].shape == (2, 3, 3, 5)  # one for APART tokens


def test_without_what_is_optional(scan, device):
    check(scan, {**arguments(device, 9, 1), "d": None, "initial": None})


@pytest.mark.parametrize("strength", [1e-3, 30.0, pytest.param(1e4, marks=SLOW)])
def test_weak_and_strong_decays(strength, scan, device):
    check(scan, arguments(device, 9, 1, strength=strength))


def test_a_time_step_of_zero_passes_the_state_on(scan, device):
    a = arguments(device, 9)
    assert torch.equal(run(*{**a, "dt": torch.zeros_like(a["dt"])}.values(), None)[1], a["initial"])


def test_parts_of_a_larger_tensor(scan, device):
    """B and C as Mamba has them: slices of one projection."""
    a = arguments(device, 9)
    both = torch.cat([a["b"], a["c"]], -1)
    parts = {**a, "b": both[..., :3], "c": both[..., 3:]}
    wanted = results(run, a)
    assert not parts["b"].is_contiguous()
    for mine, right in zip(run(*parts.values(), None), (wanted["y"], wanted["last"]), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 4, 5), (2, 4, 0)])
def test_nothing_to_do(shape, scan, device):
    B, T, D = shape
    a = arguments(device, T, B, D, rows=B)
    mine, wanted = results(run, a), results(definition, a)
    for name, w in wanted.items():
        assert torch.equal(mine[name], w), name


def test_a_nan_stays_in_its_sequence(scan, device):
    cu = torch.tensor([0, 4, 4, 9, 13], device=device)
    a = arguments(device, 13, 1, rows=4)
    whole = results(run, a, cu, [torch.ones_like(a["x"]), torch.ones_like(a["initial"])])
    a["x"][0, 5, 3] = torch.nan
    broken = results(run, a, cu, [torch.ones_like(a["x"]), torch.ones_like(a["initial"])])
    assert broken["y"][0, 5:9, 3].isnan().all() and broken["last"][2, 3].isnan().all()
    for name in ("y", *(f"gradient of {n}" for n in ("x", "dt", "b", "c"))):
        assert torch.equal(broken[name][:, :4], whole[name][:, :4]) and torch.equal(broken[name][:, 9:], whole[name][:, 9:]), name
    for name in ("last", "gradient of initial"):
        assert torch.equal(broken[name][[0, 1, 3]], whole[name][[0, 1, 3]]), name


def test_a_nan_stays_in_its_row_and_channel(scan, device):
    a = arguments(device, 9, 3)
    ones = [torch.ones_like(a["x"]), torch.ones_like(a["initial"])]
    whole = results(run, a, None, ones)
    a["x"][1, 5, 3] = torch.nan
    broken = results(run, a, None, ones)
    others = [0, 1, 2, 4]
    for name in whole.keys() - {"gradient of a", "gradient of d"}:
        assert torch.equal(broken[name][[0, 2]], whole[name][[0, 2]]), name
    for name in ("y", "gradient of x", "gradient of dt"):
        assert torch.equal(broken[name][..., others], whole[name][..., others]), name
    for name in ("last", "gradient of a", "gradient of d"):
        along = {"last": 1}.get(name, 0)
        index = torch.tensor(others, device=device)
        assert torch.equal(broken[name].index_select(along, index), whole[name].index_select(along, index)), name
    assert broken["gradient of a"][3].isnan().all()


@pytest.mark.parametrize("packed", [False, True])
def test_the_same_bits_twice(packed, scan, device):
    T, D = (3000, 512) if GPU else (9, 5)
    cu = torch.tensor([0, 2, T], device=device) if packed else None
    a = arguments(device, T, 1, D, rows=2 if packed else 1)
    one, two = results(run, a, cu), results(run, a, cu)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("of", [0, 1])
def test_the_gradient_of_one_result(of, packed, scan, device):
    cu = torch.tensor([0, 0, 2, 5], device=device) if packed else None
    gradients = []
    for function, dtype in ((run, torch.float32), (definition, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in arguments(device, 5, 1, rows=3 if packed else 1).values()]
        gradients.append(torch.autograd.grad(function(*leaves, cu)[of].square().sum(), leaves, materialize_grads=True))
    for name, mine, wanted in zip(NAMES, *gradients, strict=True):
        assert error(mine, wanted, floor=1e-30) <= 1e-5, name


@pytest.mark.parametrize("packed", [False, True])
def test_operators(packed, scan, device):
    cu = torch.tensor([0, 3], device=device) if packed else None
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    leaves = [t.clone().requires_grad_() for t in arguments(device, 3, 1, 3, 2).values()]
    torch.use_deterministic_algorithms(False)
    torch.library.opcheck(torch.ops.linattn.selective_scan_forward.default, (*leaves, cu, True), test_utils=tests)
    y, last, kept = torch.ops.linattn.selective_scan_forward.default(*(t.detach() for t in leaves), cu, True)
    backward = (*(t.detach() for t in leaves), cu, kept, y, last)
    torch.library.opcheck(torch.ops.linattn.selective_scan_backward.default, backward, test_utils=(tests[0], tests[2]))
    assert all(
        t.is_contiguous() for t in torch.ops.linattn.selective_scan_backward.default(*backward)
    )  # as compiled graphs take them to be


def test_full_graph(scan, device):
    torch._dynamo.reset()
    a = arguments(device, 6, 1)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    mine, wanted = results(compiled, a), results(run, a)
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    torch._dynamo.reset()


def test_gradients_of_gradients_are_refused(scan, device):
    leaves = [t.requires_grad_() for t in arguments(device, 5, 1).values()]
    (g,) = torch.autograd.grad(run(*leaves, None)[0].square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        torch.autograd.grad(g.square().sum(), leaves[0])


@pytest.mark.parametrize(("change", "words"), [({"dt": torch.zeros(1, 9, 5).double()}, "float64"), ({"a": torch.zeros(5, 257)}, "256")])
def test_what_the_kernels_do_not_run(change, words, scan, device):
    a = arguments(device, 9, 1)
    del a["d"]
    assert scan.refusal(*a.values(), None) is None
    assert words in scan.refusal(*{**a, **{name: t.to(device) for name, t in change.items()}}.values(), None)


@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("packed", [False, True])
def test_captured_in_a_graph(packed, scan):
    cu = torch.tensor([0, 300, 1000], device="cuda") if packed else None
    leaves = [t.requires_grad_() for t in arguments("cuda", 1000, 1, rows=2 if packed else 1).values()]
    others = [t.detach().clone().requires_grad_() for t in leaves]  # gradient accumulation is bound to the stream of its first run
    wanted = run(*others, cu)
    torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, last = run(*leaves, cu)
        gradients = torch.autograd.grad(y.sum() + last.sum(), leaves)
    check_replays(graph, (y, last, *gradients))
    assert torch.equal(y, wanted[0]) and torch.equal(last, wanted[1])


def test_more_rows_than_a_grid_has_room_for(scan, device):
    def refusal(rows: int) -> str | None:
        x, b = torch.empty(rows, 1, 1, device=device), torch.empty(rows, 1, 2, device=device)
        return scan.refusal(x, x, torch.empty(1, 2, device=device), b, b, None, None)

    assert refusal(scan.MOST) is None and f"at most {scan.MOST} rows" in refusal(scan.MOST + 1)
