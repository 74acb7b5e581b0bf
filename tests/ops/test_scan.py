"""``diagonal_scan`` (real and complex) and ``running_max`` against loops, with states, packings, resets and derivatives."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import linattn
from tests.ops.errors import error, same_bits
from tests.ops.meter import Meter

SCANS = ("real", "complex", "max")
LENGTHS = (0, 5, 0, 0, 64, 1, 33, 0)


def arguments(
    scan: str, T: int = 70, B: int = 2, D: int = 5, *, rank: str = "BTD", strength: float = 0.5, seed: int = 0, N: int | None = None
) -> dict:
    """Random decays, inputs and an initial state in float64."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    decay = -normal(*((D,) if rank == "D" else (B, T, D))).abs() * strength
    x, s = normal(B, T, D), normal(N or B, D)
    if scan == "complex":
        decay, x, s = torch.complex(decay, normal(*decay.shape)), torch.complex(x, normal(*x.shape)), torch.complex(s, normal(*s.shape))
    return {"decay": decay, "x": x, "initial_state": s}


def run(scan: str, a: dict, backend: str = "torch", **options: object) -> tuple[Tensor, Tensor]:
    door = linattn.running_max if scan == "max" else linattn.diagonal_scan
    a = dict(a)
    return door(a.pop("decay"), a.pop("x"), **a, return_state=True, backend=backend, **options)


def loop(scan: str, a: dict) -> tuple[Tensor, Tensor]:
    """The equations, a token at a time."""
    x, h, out = a["x"], a["initial_state"], []
    for t in range(x.shape[1]):
        d = a["decay"].expand(x.shape)[:, t]
        h = torch.maximum(d + h, x[:, t]) if scan == "max" else d.exp() * h + x[:, t]
        out.append(h)
    return (torch.stack(out, 1) if out else x), h


def close(mine: tuple[Tensor, ...], wanted: tuple[Tensor, ...], limit: float = 1e-12) -> None:
    for a, b in zip(mine, wanted, strict=True):
        assert a.shape == b.shape and a.dtype.is_complex == b.dtype.is_complex
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
        finite = b.isfinite()
        assert torch.equal(a[~finite], b[~finite])
        assert error(a[finite], b[finite], floor=1e-30) <= limit  # float32 ends at 1e-38


def gradients(function, a: dict, scan: str) -> tuple[Tensor, ...]:
    leaves = {n: t.clone().requires_grad_() for n, t in a.items()}
    out = function(scan, leaves)
    weights = [torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o.dtype) for o in out]
    return torch.autograd.grad(out, list(leaves.values()), weights)


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("rank", ["BTD", "D"])
@pytest.mark.parametrize("T", [0, 1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("scan", SCANS)
def test_the_equations(scan, T, rank, backend):
    a = arguments(scan, T, rank=rank)
    close(run(scan, a, backend), loop(scan, a))


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("scan", SCANS)
def test_no_channels(scan, backend):
    a = arguments(scan, 7, D=0)
    close(run(scan, a, backend), loop(scan, a))


@pytest.mark.parametrize("rank", ["BTD", "D"])
@pytest.mark.parametrize("T", [1, 65, 130])
@pytest.mark.parametrize("scan", SCANS)
def test_gradients(scan, T, rank):
    a = arguments(scan, T, rank=rank)
    close(gradients(run, a, scan), gradients(loop, a, scan), 1e-11)


@pytest.mark.parametrize("scan", SCANS)
def test_derivatives_against_finite_differences(scan):
    for options in ({"T": 3, "B": 1, "D": 2}, {"T": 66, "B": 1, "D": 1}, {"T": 4, "B": 1, "D": 2, "rank": "D"}):
        a = {n: t.requires_grad_() for n, t in arguments(scan, **options).items()}
        names = list(a)

        def function(*t: Tensor, names: list[str] = names) -> tuple[Tensor, Tensor]:
            return run(scan, dict(zip(names, t, strict=True)))

        assert gradcheck(function, tuple(a.values()), fast_mode=True)
        assert gradgradcheck(function, tuple(a.values()), fast_mode=True)


@pytest.mark.parametrize("scan", SCANS)
def test_without_an_initial_state(scan):
    a = arguments(scan, 70)
    del a["initial_state"]
    nothing = torch.full((2, 5), -torch.inf if scan == "max" else 0.0, dtype=a["x"].dtype)
    close(run(scan, a), loop(scan, {**a, "initial_state": nothing}))
    close(run(scan, a), run(scan, {**a, "initial_state": nothing}))
    close(gradients(run, a, scan), gradients(lambda s, b: loop(s, {**b, "initial_state": nothing}), a, scan))


@pytest.mark.parametrize("scan", SCANS)
def test_only_h_without_return_state(scan):
    a = arguments(scan)
    door = linattn.running_max if scan == "max" else linattn.diagonal_scan
    assert torch.equal(door(a["decay"], a["x"], initial_state=a["initial_state"]), run(scan, a)[0])


@pytest.mark.parametrize("scan", SCANS)
def test_handed_over_at_any_split(scan):
    a = arguments(scan, 140)
    whole = run(scan, a)
    for split in (0, 1, 63, 64, 65, 100, 140):
        head = {**a, "decay": a["decay"][:, :split], "x": a["x"][:, :split]}
        h, state = run(scan, head)
        tail, last = run(scan, {"decay": a["decay"][:, split:], "x": a["x"][:, split:], "initial_state": state})
        close((torch.cat([h, tail], 1), last), whole)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rank", ["BTD", "D"])
@pytest.mark.parametrize("scan", SCANS)
def test_packed_is_separate(scan, rank, dtype, backend):
    cu = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=dtype)
    a = arguments(scan, sum(LENGTHS), B=1, N=len(LENGTHS), rank=rank)

    def separate(scan: str, a: dict) -> tuple[Tensor, Tensor]:
        parts = []
        for n, (start, stop) in enumerate(zip(cu.tolist()[:-1], cu.tolist()[1:], strict=True)):
            decay = a["decay"] if rank == "D" else a["decay"][:, start:stop]
            parts.append(loop(scan, {"decay": decay, "x": a["x"][:, start:stop], "initial_state": a["initial_state"][n : n + 1]}))
        return torch.cat([h for h, _ in parts], 1), torch.cat([s for _, s in parts])

    close(run(scan, a, backend, cu_seqlens=cu), separate(scan, a))
    close(gradients(lambda s, b: run(s, b, backend, cu_seqlens=cu), a, scan), gradients(separate, a, scan), 1e-11)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
@pytest.mark.parametrize("scan", SCANS)
def test_nothing_packed(scan, lengths):
    cu = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    a = arguments(scan, 0, B=1, N=max(1, len(lengths)))
    a["initial_state"] = a["initial_state"][: len(lengths)]
    h, s = run(scan, a, cu_seqlens=cu)
    assert h.shape == (1, 0, 5) and torch.equal(s, a["initial_state"])


@pytest.mark.parametrize("strength", [1e-4, 5.0, 800.0])
@pytest.mark.parametrize("scan", SCANS)
def test_strong_decays_and_resets(scan, strength):
    """1e-5 in float32 and 1e-10 in float64, values and gradients, -inf among them."""
    a = arguments(scan, 150, strength=strength)
    where = torch.rand(2, 150, 5, generator=torch.Generator().manual_seed(2)) < 0.1
    a["decay"] = torch.where(where, complex(-torch.inf, 0.3) if scan == "complex" else -torch.inf, a["decay"])
    narrow = {n: t.to(torch.complex64 if t.is_complex() else torch.float32) for n, t in a.items()}
    wide = {n: t.to(a[n].dtype) for n, t in narrow.items()}
    close(run(scan, a), loop(scan, a), 1e-10)
    close(run(scan, narrow), loop(scan, wide), 1e-5)
    mine, wanted = gradients(run, narrow, scan), gradients(lambda s, b: run(s, b, "reference"), wide, scan)
    assert all(torch.view_as_real(g).isfinite().all() if g.is_complex() else g.isfinite().all() for g in mine)
    close(mine, wanted, 1e-5)
    close(gradients(run, a, scan), gradients(lambda s, b: run(s, b, "reference"), a, scan), 1e-10)


@pytest.mark.parametrize("scan", SCANS)
def test_nothing_before_a_reset_changes_a_bit_after_it(scan):
    for at in (1, 16, 63, 64, 65, 100):
        a = arguments(scan, 120)
        a["decay"][:, at] = -torch.inf
        other = {n: t.clone() for n, t in a.items()}
        other["x"][:, :at] *= 1e6
        other["decay"][:, :at] *= 30
        other["initial_state"] *= -1e6
        (h, s), (g, t) = run(scan, a), run(scan, other)
        assert torch.equal(h[:, at:], g[:, at:]) and torch.equal(s, t) and not torch.equal(h[:, :at], g[:, :at])


@pytest.mark.parametrize("scan", SCANS)
def test_mutants_and_nans(scan):
    """One element affects only its channel from its time on; a NaN also its chunk."""
    a = arguments(scan, 140, strength=0.01)
    h, s = run(scan, a)
    for name in ("decay", "x"):
        for t in (0, 1, 63, 64, 100):
            changed = {**a, name: a[name].clone()}
            changed[name][1, t, 3] += 9.0 if name == "x" else -0.5
            g, r = run(scan, changed)
            seen = torch.zeros_like(h.real, dtype=torch.bool)
            seen[1, t:, 3] = True
            assert torch.equal(g[~seen], h[~seen])
            assert scan == "max" or (g[seen] != h[seen]).all()
            changed[name][1, t, 3] = torch.nan
            g, r = run(scan, changed)
            seen[1, t // 64 * 64 :, 3] = True
            assert torch.equal(g[~seen], h[~seen]) and g[1, t, 3].isnan()
            assert torch.equal(r[0], s[0]) and torch.equal(r[1, :3], s[1, :3])


def test_the_maximum_makes_every_exponent_at_most_zero():
    a = arguments("max", 200, strength=3.0)
    m, _ = run("max", a)
    before = torch.cat([a["initial_state"][:, None], m[:, :-1]], 1)
    assert (a["x"] - m <= 0).all() and (a["decay"] + before - m <= 1e-12).all()


@pytest.mark.parametrize("scan", SCANS)
def test_equal_to_the_recurrence_it_is_a_part_of(scan):
    """diagonal_scan is linear_attention with k = q = 1 and K = V = 1 a channel, and the maximum a limit of it."""
    a = arguments(scan, 80)
    if scan == "real":
        ones = torch.ones(2, 80, 5, 1, dtype=torch.float64)
        o, s = linattn.linear_attention(
            ones, ones, a["x"][..., None], decay=a["decay"], scale=1.0, initial_state=a["initial_state"][..., None, None], return_state=True
        )
        close(run(scan, a), (o[..., 0], s[..., 0, 0]))
    elif scan == "max":  # log-sum-exp at a temperature of 1/50
        hot = {n: 50 * t if n == "decay" else (50 * (t - 4)).exp() for n, t in a.items()}
        over = run("real", hot)[0].log() / 50 + 4 - run(scan, a)[0]
        assert (over >= -1e-12).all() and (over <= torch.log(torch.tensor(81.0)) / 50).all()
    else:  # a complex number as a rotated pair of reals
        real = run("complex", {**a, "decay": a["decay"].real.to(torch.complex128)})
        parts = [run("real", {n: getattr(t, part) if n != "decay" else t.real for n, t in a.items()}) for part in ("real", "imag")]
        close(real, tuple(torch.complex(x, y) for x, y in zip(*parts, strict=True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype):
    a = arguments("real", 200)
    b = a["x"].to(dtype)
    h, s = linattn.diagonal_scan(a["decay"].float(), b, initial_state=a["initial_state"].float(), return_state=True)
    ref, _ = loop("real", {"decay": a["decay"].float().double(), "x": b.double(), "initial_state": a["initial_state"].float().double()})
    assert h.dtype == dtype and s.dtype == torch.float32 and error(h, ref) <= (0.003 if dtype == torch.bfloat16 else 0.0005)
    assert error(s, ref[:, -1]) < 1e-6


def test_long_float32():
    a = arguments("real", 4096, B=1, D=4, strength=0.01)
    narrow = {n: t.float() for n, t in a.items()}
    close(run("real", narrow), run("real", {n: t.double() for n, t in narrow.items()}, "reference"), 1e-4)


@pytest.mark.parametrize("scan", SCANS)
def test_no_loop_over_tokens(scan):
    def count(T: int) -> Meter:
        a = {n: t.requires_grad_() for n, t in arguments(scan, T, B=1, D=8).items()}
        with Meter() as meter:
            h, s = run(scan, a)
            torch.autograd.grad(h.abs().sum() + s.abs().sum(), list(a.values()))
        return meter

    assert count(193).operations == count(255).operations
    one, two = count(1024), count(2048)
    assert two.operations - one.operations < 1024 and two.made <= 2.1 * one.made
    assert two.largest <= 4 * 2048 * 8 * (16 if scan == "complex" else 8)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rank", ["BTD", "D"])
@pytest.mark.parametrize("scan", SCANS)
def test_compiled(scan, rank, packed):
    """Values and gradients, a separate operator there, with resets among the decays."""
    torch._dynamo.reset()
    a = arguments(scan, sum(LENGTHS), B=1 if packed else 2, N=len(LENGTHS) if packed else None, rank=rank)
    if rank == "BTD":
        a["decay"][:, 40:, 1] = -torch.inf
    options = {"cu_seqlens": torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])} if packed else {}
    function = torch.compile(lambda *t: run(scan, dict(zip(a, t, strict=True)), **options), fullgraph=True, backend="aot_eager")
    close(function(*a.values()), run(scan, a, **options))
    ours, theirs = gradients(lambda _, b: function(*b.values()), a, scan), gradients(lambda s, b: run(s, b, **options), a, scan)
    close(ours, theirs, 1e-11)
    torch._dynamo.reset()


def test_equal_ones_share_the_gradient_when_compiled():
    """As in the definition, where ties with the maximum so far get half each."""
    torch._dynamo.reset()
    a = {"decay": torch.zeros(1, 5, 2), "x": torch.ones(1, 5, 2), "initial_state": torch.ones(1, 2)}
    a = {name: t.double() for name, t in a.items()}
    function = torch.compile(lambda *t: run("max", dict(zip(a, t, strict=True))), fullgraph=True, backend="aot_eager")
    wanted = gradients(lambda s, b: run(s, b, "reference"), a, "max")
    close(gradients(lambda _, b: function(*b.values()), a, "max"), wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize("scan", SCANS)
def test_other_lengths_are_no_new_graph(scan):
    torch._dynamo.reset()
    function = torch.compile(lambda *t: run(scan, dict(zip(names, t, strict=True))), fullgraph=True, dynamic=True, backend="aot_eager")
    a = arguments(scan, 70)
    names = list(a)
    function(*a.values())
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (71, 300, 640):
            a = arguments(scan, tokens)
            close(function(*a.values()), run(scan, a))
    torch._dynamo.reset()


@pytest.mark.parametrize("scan", SCANS)
def test_autocast_and_determinism(scan):
    a = {n: t.to(torch.complex64 if t.is_complex() else torch.float32) for n, t in arguments(scan, 100).items()}
    once = run(scan, a)
    with torch.autocast("cpu", torch.bfloat16):
        same_bits(dict(zip("hs", map(torch.real, run(scan, a)), strict=True)), dict(zip("hs", map(torch.real, once), strict=True)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"decay": torch.zeros(2, 9, 4)}, ["decay", "[2, 9, 4]", "[2, 9, 5]", "[5]"]),
        ({"decay": torch.full((5,), 0.5)}, ["decay", "<= 0", "0.5"]),
        ({"decay": torch.full((5,), 0.5 + 1j)}, ["decay", "<= 0", "0.5"]),
        ({"x": torch.zeros(9, 5)}, ["[9, 5]", "[B, T, D]"]),
        ({"initial_state": torch.zeros(1, 5)}, ["initial_state", "[1, 5]", "[2, 5]"]),
        ({"initial_state": torch.zeros(2, 5).bfloat16()}, ["initial_state", "torch.bfloat16", "torch.float32"]),
        ({"initial_state": torch.zeros(2, 5, device="meta")}, ["initial_state", "meta", "cpu"]),
        ({"decay": torch.zeros(5, device="meta")}, ["decay", "meta", "cpu"]),
        ({"cu_seqlens": torch.tensor([0, 9])}, ["cu_seqlens", "B", "1", "2"]),
        ({"x": torch.zeros(2, 9, 5, dtype=torch.int64)}, ["torch.int64"]),
        ({"decay": torch.zeros(5, dtype=torch.int64)}, ["decay", "torch.int64"]),
        ({"backend": "cuda"}, ["backend", "'cuda'"]),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
@pytest.mark.parametrize("scan", ["real", "max"])
def test_refusals(scan, change, words):
    a = {"decay": torch.zeros(2, 9, 5), "x": torch.zeros(2, 9, 5), **change}
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        run(scan, {n: a[n] for n in ("decay", "x")}, a.pop("backend", "torch"), **{n: t for n, t in a.items() if n not in ("decay", "x")})
    if scan == "max" and a["decay"].is_complex():
        words = ["decay", "complex"]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("ends", [[1, 9], [0, 8], [0, 5, 3, 9], [0, 10]])
def test_cu_seqlens_that_fit_nothing(ends):
    x = torch.zeros(1, 9, 5)
    for door in (linattn.diagonal_scan, linattn.running_max):
        with pytest.raises(ValueError, match="cu_seqlens .* T = 9"):
            door(x, x, cu_seqlens=torch.tensor(ends))


def test_a_complex_input_needs_a_complex_decay_and_no_keyword_is_unknown():
    x = torch.zeros(1, 9, 5, dtype=torch.complex64)
    with pytest.raises(ValueError, match="complex"):
        linattn.diagonal_scan(x.real, x)
    with pytest.raises(ValueError, match="floating"):
        linattn.running_max(x.real, x)
    for door in (linattn.diagonal_scan, linattn.running_max):
        with pytest.raises(TypeError):
            door(x.real, x.real, axis=1)


def test_a_real_input_under_a_complex_decay_is_complex():
    a = arguments("complex", 70)
    h, s = linattn.diagonal_scan(a["decay"], a["x"].real, return_state=True)
    assert h.dtype == s.dtype == torch.complex128
    close((h, s), loop("complex", {**a, "x": a["x"].real.to(torch.complex128), "initial_state": torch.zeros_like(a["initial_state"])}))
