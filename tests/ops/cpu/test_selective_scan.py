"""The kernels of ``selective_scan`` against the definition in float64, and against the loop of transformers."""

import time

import pytest
import torch

import linattn
from linattn.ops.cpu import library
from linattn.ops.cpu import selective_scan as kernels
from tests.ops.errors import error
from tests.ops.scans import check_strong_decay, check_zero_step

NAMES = ("x", "dt", "A", "B", "C", "D", "initial_state")
LENGTHS = (0, 5, 0, 64, 1, 70, 0)


def arguments(T=70, B=2, D=20, N=16, *, rows=None, strength=0.3, x=torch.float32, rest=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    a = {"x": normal(B, T, D).to(x), "dt": (normal(B, T, D).abs() * strength).to(rest), "A": -normal(D, N).abs()}
    a |= {"B": normal(B, T, N).to(rest), "C": normal(B, T, N).to(rest), "D": normal(D)}
    return {**a, "initial_state": normal(rows or B, D, N)}


def run(a, backend="cpu", **options):
    return linattn.selective_scan(**a, return_state=True, backend=backend, **options)


def reference(a, **options):
    return run({n: t.double() for n, t in a.items()}, "reference", **options)


def gradients(function, a, **options):
    leaves = {n: t.clone().requires_grad_() for n, t in a.items()}
    out = function(leaves, **options)
    weights = [torch.randn(o.shape, generator=torch.Generator().manual_seed(i)).to(o.dtype) for i, o in enumerate(out)]
    return torch.autograd.grad(out, list(leaves.values()), weights, materialize_grads=True)


def close(mine, wanted, limit=1e-6):
    for a, b in zip(mine, wanted, strict=True):
        assert a.shape == b.shape and error(a.double(), b.double(), floor=1e-30) <= limit


@pytest.mark.parametrize(
    ("T", "B", "D", "N"),
    [(0, 2, 5, 3), (1, 1, 1, 1), (1, 3, 33, 16), (64, 1, 64, 16), (65, 2, 20, 5), (150, 1, 70, 16), (70, 1, 130, 19), (66, 1, 17, 128)],
)
def test_values_and_gradients(isa, T, B, D, N):
    a = arguments(T, B, D, N)
    close(run(a), reference(a))
    close(gradients(run, a), gradients(reference, a), 2e-6)


def test_packed(isa):
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    a = arguments(sum(LENGTHS), 1, 20, rows=len(LENGTHS))
    close(run(a, cu_seqlens=cu), reference(a, cu_seqlens=cu))
    close(gradients(run, a, cu_seqlens=cu), gradients(reference, a, cu_seqlens=cu), 2e-6)


def test_more_sequences_than_groups(isa):
    a = arguments(5, 41, 7, 3)
    close(gradients(run, a), gradients(reference, a), 2e-6)


@pytest.mark.parametrize("left_out", ["D", "initial_state"])
def test_what_may_be_left_out(isa, left_out):
    a = arguments()
    del a[left_out]
    close(run(a), reference(a))
    close(gradients(run, a), gradients(reference, a), 2e-6)


@pytest.mark.parametrize("rest", ["x", "float32"])
@pytest.mark.parametrize("x", [torch.bfloat16, torch.float16])
def test_half_precision(isa, x, rest):
    a = arguments(100, 2, 40, x=x, rest=x if rest == "x" else torch.float32)
    mine, wanted = run(a), reference(a)
    assert mine[0].dtype == x and mine[1].dtype == torch.float32
    close(mine, wanted, 4e-3)
    close(mine[1:], wanted[1:])

    def rounded(b):
        y, last = reference(b)
        return y.to(x), last

    for name, g, w in zip(a, gradients(run, a), gradients(rounded, a), strict=True):
        assert g.dtype == a[name].dtype and error(g.double(), w.double()) <= (5e-3 if g.dtype == x else 2e-6)


@pytest.mark.parametrize("strength", [1e-3, 30.0, 1e4])
def test_weak_and_strong_decays(isa, strength):
    a = arguments(150, strength=strength)
    close(run(a), reference(a), 1e-5)
    close(gradients(run, a), gradients(reference, a), 1e-5)


def test_long_memories(isa):
    T = 5000 if isa == "avx512" else 500
    a = arguments(T, 1, 4, 5)
    a["x"], a["dt"], a["initial_state"] = a["x"] + 1, torch.full_like(a["dt"], 1e-3), a["initial_state"] * 0
    a["A"] /= torch.tensor([1.0, 10.0, 100.0, 1000.0])[:, None]
    double = {n: t.double() for n, t in a.items()}
    close(run(a), run(double, "torch"), 1e-5)
    close(gradients(run, a), gradients(lambda b: run(b, "torch"), double), 1e-5)


def test_a_time_step_of_zero_passes_the_state_on(isa):
    check_zero_step(run, arguments())


def test_what_was_before_a_strong_decay_is_forgotten(isa):
    check_strong_decay(run, arguments(150))


def test_a_nan_goes_on_in_its_own_row_and_channel(isa):
    for name in ("x", "dt"):
        a = arguments()
        a[name][0, 20, 3] = torch.nan
        y, last = run(a)
        wanted = torch.zeros_like(y, dtype=torch.bool)
        wanted[0, 20:, 3] = True
        assert torch.equal(y.isnan(), wanted) and torch.equal(last.isnan().all(-1), wanted[:, -1])
        assert torch.equal(last.isnan().any(-1), wanted[:, -1])


@pytest.mark.parametrize("split", [1, 64, 100])
def test_handed_over(isa, split):
    a, parts = arguments(150), []
    state = a.pop("initial_state")
    for piece in (slice(0, split), slice(split, 150)):
        y, state = run({n: t if n in "AD" else t[:, piece] for n, t in a.items()} | {"initial_state": state})
        parts.append(y)
    close((torch.cat(parts, 1), state), run(arguments(150)))


def test_any_memory_layout(isa):
    a = arguments(33, 2, 40)
    other = {n: t.mT.contiguous().mT if t.ndim == 3 else t for n, t in a.items()}
    wide = {n: torch.cat([t, t], -1)[..., : t.shape[-1]] if t.ndim == 3 else t for n, t in a.items()}
    for b in (other, wide):
        assert all(torch.equal(x, y) for x, y in zip(run(a), run(b), strict=True))
        assert all(torch.equal(x, y) for x, y in zip(gradients(run, a), gradients(run, b), strict=True))


def test_any_memory_layout_of_time_steps(isa):
    """Shared by all channels, and tokens contiguous with gaps, as negative views."""
    a = arguments(33, 2, 40)
    shared = a["dt"][..., 0].contiguous()[..., None].expand_as(a["dt"])
    turned = torch._neg_view(-torch.cat([a["dt"], a["dt"]], 1).mT.contiguous())[..., :33].mT
    assert shared.stride()[1:] == (1, 0) and turned.stride()[1:] == (1, 66)
    for dt in (shared, turned):
        b, dense = a | {"dt": dt}, a | {"dt": dt.resolve_neg().contiguous()}
        assert all(torch.equal(x, y) for x, y in zip(run(b), run(dense), strict=True))
        assert all(torch.equal(x, y) for x, y in zip(gradients(run, b), gradients(run, dense), strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("packed", [False, True])
def test_the_same_bits_for_any_number_of_threads(packed, threads):
    cu = torch.tensor([0, 40, 40, 170]) if packed else None
    a = arguments(170, 1 if packed else 3, 200, rows=3)
    results = []
    for number in (1, 2, 5):
        threads(number)
        results.append((*run(a, cu_seqlens=cu), *gradients(run, a, cu_seqlens=cu)))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("packed", [False, True])
def test_the_operator_keeps_its_contract(packed):
    from linattn.ops.cpu import selective_scan

    a = arguments(70, 1, 6, 3, rows=3 if packed else 1)
    cu = torch.tensor([0, 4, 4, 70]) if packed else None
    leaves = [a[n].requires_grad_() for n in NAMES]
    torch.library.opcheck(torch.ops.linattn.selective_scan_cpu.default, (*leaves, cu, True))
    plain = [t.detach() for t in leaves]
    *_, kept = selective_scan.forward(*plain, cu, True)
    for d, d_last in ((plain[5], None), (None, plain[6])):
        torch.library.opcheck(
            torch.ops.linattn.selective_scan_cpu_backward.default, (torch.randn(1, 70, 6), d_last, *plain[:5], d, cu, kept)
        )


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_whole(packed):
    a, cu = arguments(70, 1, rows=3 if packed else 1), torch.tensor([0, 13, 13, 70]) if packed else None
    torch.compiler.reset()
    compiled = torch.compile(lambda b: run(b, "auto", cu_seqlens=cu), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(compiled(a), run(a, cu_seqlens=cu), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(gradients(compiled, a), gradients(run, a, cu_seqlens=cu), strict=True))


@pytest.mark.usefixtures("native")
def test_second_derivatives_are_refused():
    a = {n: t.requires_grad_() for n, t in arguments().items()}
    (g,) = torch.autograd.grad(run(a)[0].square().sum(), a["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match='backend="torch"'):
        g.sum().backward()


@pytest.mark.usefixtures("native")
def test_what_it_refuses_goes_to_the_portable_form(capsys):
    a = arguments()
    wide = {n: t.double() for n, t in a.items()}
    many = arguments(N=129)
    for b, why in ((wide, "float64"), (many, "N = 128 .* 129")):
        with pytest.raises(ValueError, match=f"backend 'cpu' cannot run this call.*{why}"):
            run(b)
        assert "torch: runs" in linattn.explain(linattn.selective_scan, **b)
        close(run(b, "auto"), reference(b))
    said = linattn.explain(linattn.selective_scan, **a)
    assert capsys.readouterr().out.endswith(said + "\n") and "cpu: runs" in said and said.count(": no, ") == 3
    y, _ = run(a)
    mapped = torch.func.vmap(lambda x: linattn.selective_scan(**{**a, "x": x}))(a["x"][None])
    close(mapped, [y])


def test_transformers(isa, transformers_scan):
    a = arguments(150)
    a["initial_state"] = torch.zeros_like(a["initial_state"])
    close(run(a), transformers_scan(a), 2e-6)
    close(gradients(run, a)[:6], gradients(transformers_scan, a)[:6], 5e-6)


@pytest.mark.usefixtures("native")
def test_faster_than_the_loop_of_transformers(threads, transformers_scan):
    threads(1)  # waiting threads of a pool would count as busy time
    a = arguments(512, 1, 512, strength=0.1)
    del a["initial_state"]

    @torch.no_grad()
    def seconds(function):
        start = time.process_time()  # processor time, since other processes share the cores
        function(a)
        return time.process_time() - start

    turns = [(seconds(run), seconds(transformers_scan)) for _ in range(12)]  # the first run faults pages in
    ours, theirs = map(min, zip(*turns, strict=True))
    factor = {"portable": 5, "avx2": 15}.get(library.isa(), 20)  # 4 lanes or none, 8, 16; 4 on a machine with 8 reach 10
    assert factor * ours < theirs, f"{ours * 1e3:.2f} ms, {theirs * 1e3:.2f} of transformers"


def gated(a, apart=False):
    """With bias and softplus of time steps and an output gate; ``apart``: dt is contiguous over tokens."""
    random = torch.Generator().manual_seed(9)
    dt = torch.randn(a["dt"].shape, generator=random).to(a["dt"].dtype)
    dt = dt.mT.contiguous().mT if apart else dt
    return a | {"dt": dt, "bias": torch.randn(a["D"].shape, generator=random), "z": torch.randn(a["x"].shape, generator=random).to(a["x"])}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("T", "B", "D", "N"), [(1, 2, 3, 4), (64, 1, 64, 16), (67, 2, 20, 5), (150, 1, 70, 16)])
def test_time_steps_and_gates_in_the_kernel(isa, T, B, D, N, apart):
    a = gated(arguments(T, B, D, N), apart)
    close(run(a, softplus=True), reference(a, softplus=True))
    del a["z"], a["bias"]
    close(run(a, softplus=True), reference(a, softplus=True))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 0.004), (torch.float16, 0.0006)])
def test_time_steps_and_gates_of_few_digits(isa, dtype, limit):
    a = gated(arguments(70, 1, 35, x=dtype, rest=dtype), apart=True)
    close(run(a, softplus=True), reference(a, softplus=True), limit)


def test_packed_with_time_steps_and_gates(isa):
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    a = gated(arguments(sum(LENGTHS), 1, 20, rows=len(LENGTHS)), apart=True)
    close(run(a, softplus=True, cu_seqlens=cu), reference(a, softplus=True, cu_seqlens=cu))


def test_gradients_of_time_steps_and_gates(isa):
    a = gated(arguments(70, 1, 20), apart=True)
    close(gradients(run, a, softplus=True), gradients(reference, a, softplus=True), 2e-6)


def test_they_are_part_of_the_kernel_where_nobody_wants_gradients(monkeypatch):
    calls, before = [], kernels.gated
    monkeypatch.setattr(kernels, "gated", lambda *x, **o: calls.append(o) or before(*x, **o))
    a = gated(arguments(5, 1, 4))
    for backend in ("auto", "cpu"):
        run(a, backend, softplus=True)
        assert calls.pop()["z"] is a["z"]
        assert not calls
    run(a | {"z": a["z"].clone().requires_grad_()}, softplus=True)
    assert not any(calls)  # a call with nothing but the scan


def test_refusals_of_time_steps_and_gates():
    a = gated(arguments(5, 1, 4))
    for name, t in (("bias", torch.ones(3)), ("z", torch.ones(1, 5, 3)), ("z", a["z"].double())):
        with pytest.raises(ValueError, match=name):
            run(a | {name: t}, softplus=True)
    leaf = a | {"x": a["x"].clone().requires_grad_()}  # gradients take another code path
    for name, t in (("dt", torch.ones(1, 5, 7)), ("dt", a["dt"].double()), ("dt", a["dt"].long()), ("x", torch.ones(5, 4))):
        with pytest.raises(ValueError, match=f"{name} must "):
            run(leaf | {name: t}, softplus=True)
    with pytest.raises(TypeError, match="dt must be a tensor"):
        run(leaf | {"dt": None}, softplus=True)
    with pytest.raises(ValueError, match="dt is a time step"):
        run(a, softplus=False)
