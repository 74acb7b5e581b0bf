"""Scans that find the ends of segments leave out what has vanished there, with a decay per head, and nothing else."""

import math
from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from linattn.ops.triton import hopper, launch, table
from linattn.ops.triton.decays import SPAN, reach
from linattn.ops.triton.hopper import gluon_refusal
from linattn.ops.triton.run import Run
from tests.ops.cases import Call, make
from tests.ops.errors import error, same_bits
from tests.ops.test_decays import INF, NAN
from tests.ops.triton import test_parts
from tests.ops.triton.device import DEVICE, INTERPRETED, check, first, gradients, here

SEGMENT = 48 if INTERPRETED else 256
T = 3 * SEGMENT
SIZE = dict(K=6, V=5) if INTERPRETED else dict(K=64, V=64)
CHUNK = 16 if INTERPRETED else table.chunk(half=False)
ORDERS = 192 / SEGMENT  # binary orders of a token's decay with which two thirds of a segment remain
KINDS = ("plain", "beta", "bonus", "normalize")


@pytest.fixture(autouse=True)
def several_chunks(small_pieces, monkeypatch):
    """Segments of several chunks, on any card."""
    monkeypatch.setattr(hopper, "_hopper", lambda device: False)
    monkeypatch.setattr(table, "SHORTEST", SEGMENT)
    monkeypatch.setattr(table, "PROGRAMS", 128)
    launch._programs.clear()
    yield
    launch._programs.clear()


@triton.jit
def portable(bounds, out, step, count, BACK: tl.constexpr, GROWS: tl.constexpr):
    near, vanishes = reach(bounds, step, count, BACK, 0.5, GROWS)
    tl.store(out, near)
    tl.store(out + 1, vanishes.to(tl.int32))


GONE = math.log2(torch.finfo(torch.float32).tiny)
LIMIT = 1e-5
MOST = 2 * SPAN.value + 100


@pytest.mark.parametrize("kernels", ["portable"] if INTERPRETED else ["portable", "hopper"])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 7, SPAN.value, MOST])
@pytest.mark.parametrize("which", ["none", "few", "many", "exact", "reset", "nan", "growth", "growth at last"])
def test_how_far_a_state_reaches(which, count, step, back, kernels):
    """Bounds are whole numbers, which float32 sums exactly."""
    if kernels == "hopper" and (torch.cuda.get_device_capability()[0] != 9 or gluon_refusal(torch.device(DEVICE))):
        pytest.skip("needs Hopper's own kernels")
    if kernels == "hopper":
        from tests.ops.triton.hopper_reach import measure
    else:
        measure = portable
    below = {"few": 2, "many": 9, "reset": 2, "growth": 9, "growth at last": 40}.get(which, 1)
    x = -torch.randint(0, below, (MOST,), generator=torch.Generator().manual_seed(1)).float()
    if which == "exact":
        x[:] = GONE / 3
    if which == "growth":
        x[1::3] += 20
        x[1::7] -= 30
    if which in ("reset", "nan", "growth at last"):
        x[count // 3] = {"reset": -INF, "nan": NAN, "growth at last": 1000}[which]
    given = x[:1].expand(count) if step == 0 else x[:count]
    left = (given.flip(0) if back else given).double().cumsum(0)
    passed = max((n + 1 for n in range(count) if not left[n] <= GONE), default=0)

    spread, out = torch.full((MOST * max(step, 1),), NAN, device=DEVICE), torch.empty(2, dtype=torch.int32, device=DEVICE)
    spread[:: max(step, 1)] = 2 * x.to(DEVICE)
    measure[(1,)](spread, out, step, count, back, "growth" in which)
    assert out.tolist() == [min(passed + 1, count), int(passed < count)]


def faded(kind: str, rank: str = "BTH", **shape) -> Call:
    """Heads whose states reach further than a segment, two thirds of it, and two tokens."""
    call = make(kind, rank, **({"B": 1, "T": T} | shape), **SIZE, H=3)
    orders = torch.tensor([0.01, ORDERS, 90.0], dtype=torch.float64)
    return call.with_(decay=(-math.log(2) * orders).expand(call.tensors["decay"].shape).clone())


SHAPES = [{}, {"lengths": (SEGMENT + 5, 0, 3, SEGMENT + 17, SEGMENT - 2)}, {"initial": False}]
QUICK = [("plain", SHAPES[0]), ("beta", SHAPES[0]), ("beta", SHAPES[1])]


@pytest.mark.parametrize(("kind", "shape"), first(QUICK, product(KINDS, SHAPES)), ids=str)
def test_heads_differ(kind, shape):
    check(faded(kind, **shape), torch.float32)


FEW = [("plain", "H"), ("beta", "BTH")]


@pytest.mark.parametrize(("kind", "rank"), first(FEW, product(["plain", "beta"], ["H", "BTH"])))
def test_decays_in_bfloat16_and_constant(kind, rank):
    check(faded(kind, rank), torch.bfloat16, decay=torch.bfloat16, capped=False)


@pytest.mark.parametrize("kind", ["plain", "beta"])
def test_resets(kind):
    call = faded(kind)
    decay = call.tensors["decay"].clone()
    decay[:, SEGMENT // 2, 0] = decay[:, 2 * SEGMENT - 1, 0] = decay[:, 0, 1] = decay[:, 2 * SEGMENT, 1] = -INF
    check(call.with_(decay=decay), torch.float32)


@pytest.mark.parametrize("kind", ["plain", "beta"])
def test_no_gradient_crosses_a_reset_that_is_out_of_reach(kind):
    """The decays after it, to the end of its segment, leave a subnormal number of a state."""
    call = here(faded(kind)).to(torch.float32)
    decay, v = call.tensors["decay"].clone(), call.tensors["v"].requires_grad_()
    decay[:, SEGMENT, 1] = -INF
    o = call.with_(decay=decay, v=v)(backend="triton")["o"]
    (grad,) = torch.autograd.grad(o[:, 2 * SEGMENT :, 1].sum(), v)
    assert grad[:, 2 * SEGMENT - 1, 1].all() and not grad[:, :SEGMENT].any()


@pytest.mark.parametrize("kind", ["plain", "beta", "bonus"])
def test_what_barely_reaches_a_segments_end_counts(kind):
    """Numbers so large that they are of the size of others after almost 126 binary orders, once written and once as a cotangent."""
    far = math.ceil(-GONE / ORDERS) - 2
    at, size = SEGMENT - 1 - far, 2.0 ** (far * ORDERS)
    call = here(faded(kind, initial=False)).to(torch.float32)
    t = {name: x[:, :, 1:2] for name, x in call.tensors.items() if name != "bonus"} | {"q": call.tensors["q"][:, :, 1:2]}
    if kind == "bonus":
        t["bonus"] = call.tensors["bonus"][1:2]
    call = call.with_(**t)
    v = t["v"].clone()
    v[:, at] *= size
    large = call.with_(v=v)
    got, wanted = large(backend="triton")["o"][:, SEGMENT : SEGMENT + 4], large.double()(backend="torch")["o"][:, SEGMENT : SEGMENT + 4]
    assert error(call(backend="torch")["o"][:, SEGMENT : SEGMENT + 4], wanted) > 100 * LIMIT  # it counts
    assert error(got, wanted) < LIMIT

    def gradient(call: Call, size: float, backend: str) -> torch.Tensor:
        v = call.tensors["v"].requires_grad_()
        loss = call.with_(v=v)(backend=backend)["o"].clone()
        weights = torch.ones_like(loss)
        weights[:, SEGMENT + far] = size
        return torch.autograd.grad((loss * weights).sum(), v)[0][:, SEGMENT - 4 : SEGMENT]

    wanted = gradient(call.double(), size, "torch")
    assert error(gradient(call, 1.0, "torch"), wanted) > 100 * LIMIT
    assert error(gradient(call, size, "triton"), wanted) < LIMIT


@pytest.mark.parametrize("kind", ["plain", "beta", "bonus"])
def test_what_does_not_reach_it_is_not_read(kind):
    """A NaN shows what is read."""
    call = here(faded(kind)).to(torch.float32)
    v = call.tensors["v"].clone()
    v[:, 0] = NAN
    with torch.no_grad():
        o = call.with_(v=v)(backend="triton")["o"]
    assert o[:, 0].isnan().all() and not o[:, SEGMENT:, 1:].isnan().any() and o[:, SEGMENT:, 0].isnan().all()

    v = call.tensors["v"].clone().requires_grad_()
    o = call.with_(v=v)(backend="triton")["o"]
    weights = torch.ones_like(o)
    weights[:, 2 * SEGMENT - 1] = NAN
    grad = torch.autograd.grad((o * weights).sum(), v)[0]
    assert grad[:, 2 * SEGMENT - 1].isnan().all() and not grad[:, :SEGMENT, 1:].isnan().any() and grad[:, :SEGMENT, 0].isnan().all()


def test_a_state_that_grows_before_it_fades_counts():
    """In one head written at the start of a segment; it grows in the first chunk, and the last two, not one of them alone, let it vanish.

    In the other head the cotangent likewise, in the opposite direction.
    """
    call = here(make("beta", "BTH", B=1, T=T, H=2, **SIZE, initial=False)).to(torch.float32)
    t = {name: x.clone() for name, x in call.tensors.items()}
    t["q"][:] = t["k"][:] = t["k"][:, :1]
    for name in ("beta", "decay"):
        t[name].zero_()
    fade, growth = -130 / (2 * CHUNK) * math.log(2), 1.0 + 2.0**15  # of each of four tokens
    t["decay"][:, SEGMENT - 2 * CHUNK : SEGMENT, 0] = t["decay"][:, SEGMENT : SEGMENT + 2 * CHUNK, 1] = fade
    t["beta"][:, 1:5, 0] = t["beta"][:, 2 * SEGMENT - 5 : 2 * SEGMENT - 1, 1] = growth
    t["beta"][:, 0, 0] = t["beta"][:, SEGMENT - 1, 1] = 0.5
    t["v"] *= (t["beta"] == 0.5)[..., None]
    found = []
    for backend in ("triton", "torch"):
        exact = call.with_(**t) if backend == "triton" else call.with_(**t).double()
        v = exact.tensors["v"].requires_grad_()
        o = exact(backend=backend)["o"]
        (grad,) = torch.autograd.grad(o[:, 2 * SEGMENT - 1, 1].sum(), v)
        found.append((o[:, SEGMENT : SEGMENT + 4, 0].detach(), grad[:, SEGMENT - 1, 1]))
    for got, wanted in zip(*found, strict=True):
        assert wanted.any() and error(got, wanted) < LIMIT


@pytest.mark.parametrize("strong", [False, True])
def test_long_keys_carry_a_state_past_strong_decays(strong):
    """All keys point in one direction; the 16 long ones of a segment multiply the state by 1 - β|k|² = -1 / decays, or nearly."""
    orders, apart = 1.5 * 126 / 16, SEGMENT // 16
    call = make("beta", "BTH", B=1, T=T, H=2, **SIZE, initial=True)
    t = {name: x.clone() for name, x in call.tensors.items()}
    t["k"][:] = t["k"][:, :1]
    t["beta"].zero_()
    t["beta"][:, apart - 1 :: apart] = 1.0 + 2.0 ** (orders - 0.1)
    t["decay"][:] = -orders / apart * math.log(2) * (3 if strong else 1)
    check(call.with_(**t), torch.float32)


BORDERS = (0, 5, SEGMENT, 2 * SEGMENT + 1, 3 * SEGMENT + 8)
PARTS = [("plain", ()), ("gated delta", BORDERS)]


@pytest.mark.parametrize(("rule", "borders"), first(PARTS, product(["plain", "gated delta"], [(), BORDERS])), ids=str)
def test_parts_of_a_row(rule, borders, device, monkeypatch):
    """Every segment counts there, the last one too."""

    def rules(tokens: int) -> dict[str, dict[str, torch.Tensor]]:
        decay = torch.tensor([0.01, ORDERS]).mul(-math.log(2)).expand(test_parts.BATCH, tokens, -1)
        return {"plain": {"decay": decay}, "gated delta": given["gated delta"] | {"decay": decay}}

    given = test_parts.rules(3 * SEGMENT + 8)
    monkeypatch.setattr(test_parts, "rules", rules)
    test_parts.compare(rule, (2 * SEGMENT - 7, SEGMENT + 15), device, borders)


def test_bounds_are_kept_with_the_prepared_chunks(monkeypatch):
    """Without these the backward pass computes them again."""
    call, reused, prepare, found = here(faded("beta")).to(torch.float32), [], Run.prepare, []

    monkeypatch.setattr(
        Run, "prepare", lambda run, *given: reused.append(len(given) > 1 and given[1][2] is not None) or prepare(run, *given)
    )
    for reason in (None, "this test asks for both"):
        monkeypatch.setattr(Run, "unkept", lambda run, reason=reason: reason)
        launch._programs.clear()
        reused.clear()
        found.append(gradients(call))
        assert any(reused) == (reason is None)
    for one, other in zip(*found, strict=True):
        same_bits(one, other)
