"""``selective_scan`` against a loop and transformers' Mamba: states, packings, strong decays, derivatives, speed."""

import time

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import linattn
from tests.ops.errors import error
from tests.ops.scans import check_strong_decay, check_zero_step

NAMES = ("x", "dt", "A", "B", "C", "D", "initial_state")
LENGTHS = (0, 5, 0, 64, 1, 70, 0)


def arguments(T=150, B=2, D=5, N=3, *, rows=None, strength=1.0, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    a = {"x": normal(B, T, D), "dt": normal(B, T, D).abs() * strength, "A": -normal(D, N).abs(), "B": normal(B, T, N), "C": normal(B, T, N)}
    return {**a, "D": normal(D), "initial_state": normal(rows or B, D, N)}


def loop(a, cu=None):
    """The equation, a token at a time."""
    ends = [0, a["x"].shape[1]] if cu is None else cu.tolist()
    ys, lasts = [a["x"][:, :0]], []
    for n, (start, stop) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        h = a["initial_state"] if cu is None else a["initial_state"][n : n + 1]
        for t in range(start, stop):
            x, dt, b, c = (a[name][:, t] for name in ("x", "dt", "B", "C"))
            h = torch.exp(dt[:, :, None] * a["A"]) * h + torch.einsum("bd,bn->bdn", dt * x, b)
            ys.append((torch.einsum("bdn,bn->bd", h, c) + a["D"] * x)[:, None])
        lasts.append(h)
    return torch.cat(ys, 1), torch.cat(lasts)


def run(a, **options):
    return linattn.selective_scan(**a, return_state=True, **options)


def gradients(function, a):
    leaves = {n: t.clone().requires_grad_() for n, t in a.items()}
    out = function(leaves)
    weights = [torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) for o in out]
    return torch.autograd.grad(sum((o * w).sum() for o, w in zip(out, weights, strict=True)), list(leaves.values()), materialize_grads=True)


def close(mine, wanted, limit=1e-12):
    for a, b in zip(mine, wanted, strict=True):
        assert a.shape == b.shape and error(a, b) <= limit


@pytest.fixture(params=[1, 2**16])
def cache(request, monkeypatch):
    """One chunk at a time, and all side by side."""
    monkeypatch.setattr("linattn.ops.torch.selective_scan.CACHE", request.param)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 150])
def test_the_equation_and_its_gradients(T):
    a = arguments(T)
    close(run(a), loop(a))
    close(run(a, backend="reference"), loop(a))
    close(gradients(run, a), gradients(loop, a), 1e-11)


@pytest.mark.parametrize("none", ["D", "N"])
def test_no_channels_and_states_of_no_numbers(none):
    a = arguments(5, **{none: 0})
    close(run(a), loop(a))
    assert [g.shape for g in gradients(run, a)] == [t.shape for t in a.values()]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_is_separate(dtype):
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(dtype)
    a = arguments(sum(LENGTHS), B=1, rows=len(LENGTHS))
    for backend in ("torch", "reference"):
        close(run(a, cu_seqlens=cu, backend=backend), loop(a, cu))
    close(gradients(lambda b: run(b, cu_seqlens=cu), a), gradients(lambda b: loop(b, cu), a), 1e-11)


@pytest.mark.parametrize("split", [0, 1, 64, 100, 150])
def test_handed_over_at_any_split(split):
    a, parts = arguments(150), []
    state = a.pop("initial_state")
    for piece in (slice(0, split), slice(split, 150)):
        y, state = run({n: t if n in "AD" else t[:, piece] for n, t in a.items()} | {"initial_state": state})
        parts.append(y)
    close((torch.cat(parts, 1), state), loop(arguments(150)))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("strength", [1e-3, 30.0, 1e4])
def test_weak_and_strong_decays(strength):
    a = arguments(150, strength=strength)
    close(run(a), loop(a), 1e-11)
    narrow = {n: t.float() for n, t in a.items()}
    close(run(narrow), loop({n: t.double() for n, t in narrow.items()}), 1e-5)


@pytest.mark.usefixtures("cache")
def test_what_was_before_a_strong_decay_is_forgotten():
    check_strong_decay(run, arguments(150))


@pytest.mark.usefixtures("cache")
def test_a_time_step_of_zero_passes_the_state_on():
    check_zero_step(run, arguments(70))


def test_derivatives_against_finite_differences():
    a = {n: t.requires_grad_() for n, t in arguments(5, B=1, D=2, N=2).items()}
    a["dt"] = (a["dt"].detach() + 0.1).requires_grad_()
    function = lambda *t: run(dict(zip(NAMES, t, strict=True)))  # noqa: E731
    assert gradcheck(function, tuple(a[n] for n in NAMES))
    assert gradgradcheck(function, tuple(a[n] for n in NAMES))


def test_half_precision():
    a = arguments(150, strength=0.3)
    narrow = {n: t.bfloat16() if n in ("x", "B", "C") else t.float() for n, t in a.items()}
    y, state = run(narrow)
    wanted = loop({n: t.double() for n, t in narrow.items()})
    assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert error(y.double(), wanted[0]) < 4e-3 and error(state.double(), wanted[1]) < 1e-5


def test_long_float32():
    a = {n: t.float() for n, t in arguments(5000, B=1, strength=0.02).items()}
    close(run(a), loop({n: t.double() for n, t in a.items()}), 1e-5)


def test_transformers(transformers_scan):
    a = {n: t.float() for n, t in arguments(150).items()}
    a["initial_state"] = torch.zeros_like(a["initial_state"])
    close(run(a), transformers_scan(a), 1e-5)


def test_faster_than_the_loop_of_transformers(transformers_scan):
    a = {n: t.float() for n, t in arguments(2048, B=1, D=1536, N=16, strength=0.1).items()}

    @torch.no_grad()
    def seconds(function):
        times = []
        for _ in range(2):
            start = time.perf_counter()
            function(a)
            times.append(time.perf_counter() - start)
        return min(times)

    assert 5 * seconds(run) < seconds(transformers_scan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 5)}, "x must have shape"),
        ({"dt": torch.zeros(2, 4, 5)}, r"dt must have shape \[B, T, D\]"),
        ({"dt": -torch.ones(2, 7, 5).double()}, "dt is a time step"),
        ({"A": torch.ones(5, 3).double()}, "A is the natural logarithm|A .* <= 0"),
        ({"B": torch.zeros(2, 7, 4).double()}, r"B must have shape \[B, T, N\]"),
        ({"D": torch.zeros(4).double()}, r"D must have shape \[D\]"),
        ({"initial_state": torch.zeros(2, 5, 3)}, "initial_state must be torch.float64"),
        ({"initial_state": torch.zeros(1, 5, 3).double()}, r"initial_state must have shape \[rows, D, N\]"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "B must be 1"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        linattn.selective_scan(**{**arguments(7), **change})


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole(packed):
    cu = torch.tensor([0, 13, 13, 100]) if packed else None
    a = arguments(100, B=1, rows=3 if packed else 1)
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    close(compiled(a, cu_seqlens=cu), loop(a, cu))
    close(gradients(lambda b: compiled(b, cu_seqlens=cu), a), gradients(lambda b: loop(b, cu), a), 1e-11)


def test_functional_transforms():
    batches = [arguments(70, seed=seed) for seed in range(3)]
    stacked = {name: torch.stack([a[name] for a in batches]) for name in NAMES}

    def loss(a):
        y, state = run(a)
        return y.square().sum() + state.sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(stacked)
    for i, a in enumerate(batches):
        leaves = {n: t.clone().requires_grad_() for n, t in a.items()}
        wanted = torch.autograd.grad(loss(leaves), list(leaves.values()))
        close([mapped[name][i] for name in NAMES], wanted, 1e-11)
