"""The kernels of ``diagonal_scan`` and ``running_max`` against loops in float64."""

import pytest
import torch

import linattn
from linattn.ops.cpu import library
from tests.ops.errors import error

KINDS = ("sum", "maximum")
LENGTHS = (0, 5, 0, 0, 64, 1, 33, 0)


def arguments(kind, T=70, B=2, D=5, *, constant=False, dtype=torch.float32, N=None, seed=0, strength=0.5):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    decay = -normal(*((D,) if constant else (B, T, D))).abs() * strength
    return {"decay": decay, "x": normal(B, T, D).to(dtype), "initial_state": normal(N or B, D)}


def run(kind, a, backend="cpu", **options):
    door = linattn.diagonal_scan if kind == "sum" else linattn.running_max
    return door(a["decay"], a["x"], initial_state=a.get("initial_state"), return_state=True, backend=backend, **options)


def reference(kind, a, **options):
    return run(kind, {n: t.double() for n, t in a.items()}, "reference", **options)


def gradients(function, kind, a, **options):
    leaves = {n: t.clone().requires_grad_() for n, t in a.items()}
    out = function(kind, leaves, **options)
    weights = [torch.randn(o.shape, generator=torch.Generator().manual_seed(i)).to(o.dtype) for i, o in enumerate(out)]
    return torch.autograd.grad(out, list(leaves.values()), weights, materialize_grads=True)


def close(mine, wanted, limit=1e-6):
    for a, b in zip(mine, wanted, strict=True):
        assert a.shape == b.shape and error(a.double(), b.double(), floor=1e-30) <= limit


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("T", "B", "D"), [(0, 2, 5), (1, 1, 1), (3, 2, 16), (70, 3, 64), (65, 1, 67), (200, 2, 130)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(isa, kind, T, B, D, constant):
    a = arguments(kind, T, B, D, constant=constant)
    close(run(kind, a), reference(kind, a))
    close(gradients(run, kind, a), gradients(reference, kind, a), 2e-6)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed(isa, kind, constant):
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    a = arguments(kind, sum(LENGTHS), 1, 20, N=len(LENGTHS), constant=constant)
    close(run(kind, a, cu_seqlens=cu), reference(kind, a, cu_seqlens=cu))
    close(gradients(run, kind, a, cu_seqlens=cu), gradients(reference, kind, a, cu_seqlens=cu), 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_more_sequences_than_groups(isa, kind):
    a = arguments(kind, 5, 41, 7, constant=True)
    close(gradients(run, kind, a), gradients(reference, kind, a), 2e-6)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("strength", [1e-3, 1e-5])
def test_long_memories(isa, strength, constant):
    T = 20_000 if isa == "avx512" else 2000
    a = arguments("sum", T, 1, 20, constant=True)
    a["decay"] = -torch.rand(20) * strength
    if not constant:
        a["decay"] = a["decay"].expand(1, T, 20).contiguous()
    a["x"] += 1.0
    wanted = run("sum", {n: t.double() for n, t in a.items()}, "torch")
    close(run("sum", a), wanted, 1e-5)
    double = {n: t.double() for n, t in a.items()}
    close(gradients(run, "sum", a), gradients(lambda k, b: run(k, b, "torch"), "sum", double), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(isa, kind, dtype):
    a = arguments(kind, 100, 2, 70, dtype=dtype)
    mine, wanted = run(kind, a), reference(kind, a)
    assert mine[0].dtype == (dtype if kind == "sum" else torch.float32)
    close(mine, wanted, 3e-3)
    close(mine[1:], wanted[1:])
    wanted_gradients = gradients(lambda k, b: tuple(t.to(m.dtype) for t, m in zip(reference(k, b), mine, strict=True)), kind, a)
    for name, x, y in zip(a, gradients(run, kind, a), wanted_gradients, strict=True):
        assert x.dtype == a[name].dtype and error(x.double(), y.double()) <= 5e-3


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_initial_state(isa, kind):
    a = arguments(kind)
    del a["initial_state"]
    close(run(kind, a), reference(kind, a))
    close(gradients(run, kind, a), gradients(reference, kind, a), 2e-6)


@pytest.mark.parametrize("D", [5, 70])
def test_a_reset_clears_infinities(isa, D):
    a = arguments("sum", 70, D=D)
    a["decay"][:, 30] = -torch.inf
    a["decay"][:, 40, 2] = -1e4
    close(run("sum", a), reference("sum", a))
    close(gradients(run, "sum", a), gradients(reference, "sum", a), 2e-6)
    other = {n: t.clone() for n, t in a.items()}
    other["x"][:, :30], other["initial_state"][:] = torch.inf, torch.nan
    for mine, theirs in zip(run("sum", a), run("sum", other), strict=True):
        assert torch.equal(mine[:, 30:] if mine.ndim == 3 else mine, theirs[:, 30:] if theirs.ndim == 3 else theirs)


def test_ties_share_a_gradient(isa):
    x = torch.randint(-3, 1, (2, 60, 18), generator=torch.Generator().manual_seed(0)).float()
    a = {"decay": torch.randint(-2, 1, x.shape, generator=torch.Generator().manual_seed(1)).float(), "x": x}
    a["x"][:, :10] = -torch.inf
    assert all(torch.equal(x.double(), y) for x, y in zip(run("maximum", a), reference("maximum", a), strict=True))
    close(gradients(run, "maximum", a), gradients(reference, "maximum", a))


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_goes_on_in_its_own_row_and_channel(isa, kind):
    a = arguments(kind)
    a["x"][0, 20, 3] = torch.nan
    h, last = run(kind, a)
    wanted = torch.zeros_like(h, dtype=torch.bool)
    wanted[0, 20:, 3] = True
    assert torch.equal(h.isnan(), wanted) and torch.equal(last.isnan(), wanted[:, -1])
    a["x"][0, 20, 3], a["decay"][0, 20, 3] = 0.0, torch.nan
    assert torch.equal(run(kind, a)[0].isnan(), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_any_memory_layout(isa, kind):
    a = arguments(kind, 33, 2, 70)
    other = {n: t.mT.contiguous().mT for n, t in a.items()}
    wide = torch.cat([a["x"], a["x"]], -1)[..., :70]
    for b in (other, {**a, "x": wide}, {**a, "x": torch.imag(torch.complex(a["x"], -a["x"]).conj())}):
        assert all(torch.equal(x, y) for x, y in zip(run(kind, a), run(kind, b), strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_for_any_number_of_threads(kind, threads):
    a = arguments(kind, 300, 3, 200, constant=True)
    results = []
    for number in (1, 2, 5):
        threads(number)
        results.append((*run(kind, a), *gradients(run, kind, a)))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_keeps_its_contract(kind, constant, packed):
    a = arguments(kind, 20, 1, 6, constant=constant)
    leaves = [a["decay"].requires_grad_(), a["x"].requires_grad_(), None if constant else a["initial_state"].requires_grad_()]
    if packed:
        leaves[2] = torch.randn(3, 6, requires_grad=True)
    cu = torch.tensor([0, 4, 4, 20]) if packed else None
    from linattn.ops.cpu import scan

    torch.library.opcheck(torch.ops.linattn.scan_cpu.default, (kind, *leaves, cu))
    out = scan.forward(kind, *(t if t is None else t.detach() for t in leaves), cu)[0]
    plain = [t if t is None else t.detach() for t in leaves]
    for of_decay in (False, True):
        arguments_ = (kind, plain[0], plain[1], out, plain[2], cu, torch.randn_like(out), None, of_decay)
        torch.library.opcheck(torch.ops.linattn.scan_cpu_backward.default, arguments_)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_whole(kind):
    a = arguments(kind, 50, 2, 20)
    torch.compiler.reset()
    compiled = torch.compile(lambda k, b: run(k, b, "auto"), fullgraph=True, backend="aot_eager")
    assert all(torch.equal(x, y) for x, y in zip(compiled(kind, a), run(kind, a), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(gradients(compiled, kind, a), gradients(run, kind, a), strict=True))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_are_refused(kind):
    a = {n: t.requires_grad_() for n, t in arguments(kind).items()}
    (g,) = torch.autograd.grad(run(kind, a)[0].square().sum(), a["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match='backend="torch"'):
        g.sum().backward()


@pytest.mark.usefixtures("native")
def test_what_it_refuses_goes_to_the_portable_form(capsys):
    a = arguments("sum")
    for decay, x, why in (
        (a["decay"].double(), a["x"], "float64"),
        (a["decay"] + 0j, a["x"], "complex64"),
    ):
        said = linattn.explain(linattn.diagonal_scan, decay, x)
        assert capsys.readouterr().out == said + "\n"
        assert f"cpu: no, its states are float32, but those of this call are torch.{why}" in said and "torch: runs" in said
        with pytest.raises(ValueError, match=f"backend 'cpu' cannot run this call.*{why}"):
            linattn.diagonal_scan(decay, x, backend="cpu")
    assert "cpu: runs" in linattn.explain(linattn.running_max, a["decay"], a["x"])
    assert "cpu: no, it was not asked for" in linattn.explain(linattn.running_max, a["decay"], a["x"], backend="torch")
    mapped = torch.func.vmap(linattn.running_max)(a["decay"][None], a["x"][None])
    close(mapped, [linattn.running_max(a["decay"], a["x"])])
    with pytest.raises(ValueError, match="vmap"):
        torch.func.vmap(lambda d, x: linattn.running_max(d, x, backend="cpu"))(a["decay"][None], a["x"][None])
    with torch.autograd.forward_ad.dual_level():  # the sum is linear in x, so its tangent is the sum of x's
        dual = torch.autograd.forward_ad.make_dual(a["x"], a["x"].flip(1))
        tangent = torch.autograd.forward_ad.unpack_dual(linattn.diagonal_scan(a["decay"], dual)).tangent
        close([tangent], [linattn.diagonal_scan(a["decay"], a["x"].flip(1))])
        with pytest.raises(ValueError, match="forward mode"):
            linattn.diagonal_scan(a["decay"], dual, backend="cpu")


@pytest.mark.parametrize("op", [torch.cumsum, linattn.long_conv])
def test_explain_refuses_what_it_does_not_know(op):
    with pytest.raises(ValueError, match="explain knows linear_attention"):
        linattn.explain(op, torch.zeros(1, 3, 2))


def test_the_library_refuses_half_precision_of_other_kinds():
    assert "float8" in (library.refusal(torch.zeros(1, dtype=torch.float8_e5m2)) or "")
