"""Decays of any strength are exact, and nothing before a reset changes a bit after it."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.ops.cases import FORMS, KINDS, Call, cotangent, decays, gradients, make, same_elsewhere
from tests.ops.errors import admitted, check_gradients, check_values, error, same_bits

WEAK, STRONG = 1e-4, 800.0
STRENGTHS = {"weak": (WEAK, WEAK), "five": (5.0, 5.0), "thirty": (30.0, 30.0), "strong": (STRONG, STRONG), "mixed": (WEAK, STRONG)}
INF = float("inf")


def with_resets(call: Call, share: float = 0.1, seed: int = 1) -> Call:
    """-inf in a share of the entries of decay; with erase also read = write = 0 there, as a reset needs."""
    random = torch.Generator().manual_seed(seed)
    decay = call.tensors["decay"]
    return call.with_(decay=decay.masked_fill(torch.rand(decay.shape, generator=random) < share, -INF))


def undivided(call: Call) -> Call:
    """With resets at every token, o / (q z) is v for any q and k, whose gradients are only rounding errors."""
    return call.set(normalize="return") if "normalize" in call.options else call


def in_float32(call: Call) -> Call:
    """``call`` on numbers of float32, so that float32 and float64 have one reference."""
    return call.to(torch.float32).double()


@pytest.mark.parametrize(("strength", "form"), [*((s, "chunk") for s in STRENGTHS), ("mixed", "parallel"), ("mixed", "recurrent")])
@pytest.mark.parametrize("rank", ["H", "HK", "BTH", "BTHK"])
@pytest.mark.parametrize("kind", KINDS)
def test_strong_decays(kind, rank, strength, form):
    """Values and gradients, that of decay too: 1e-5 in float32 and 1e-10 in float64."""
    call = in_float32(undivided(make(kind, rank, B=1, T=70, K=6, V=5, strength=STRENGTHS[strength], seed=3)))
    assert admitted(call)
    for dtype in (torch.float32, torch.float64):
        check_gradients(call, dtype, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", ["H", "HK", "BTH", "BTHK"])
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_with_resets(kind, rank, dtype, form):
    """All strengths and -inf inside one chunk; for constant ranks whole heads and channels that are reset at every token."""
    share = 0.1 if rank.startswith("BT") else 0.4
    call = in_float32(undivided(with_resets(make(kind, rank, B=2, T=70, H=4, K=6, V=5, strength=(WEAK, STRONG), seed=4), share)))
    assert bool(call.tensors["decay"].isinf().any()) and bool(call.tensors["decay"].isfinite().any())
    check_gradients(call, dtype, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", ["H", "HK", "BTH", "BTHK"])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_reset_at_every_token(kind, rank, form):
    call = make(kind, rank, T=66)
    check_gradients(undivided(call.with_(decay=torch.full_like(call.tensors["decay"], -INF))), torch.float64, form=form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", ["H", "HK", "BTH", "BTHK"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_decay_of_zero_is_no_decay(kind, rank, form):
    call = make(kind, rank, T=66)
    none, zero = call.without("decay"), call.with_(decay=torch.zeros_like(call.tensors["decay"]))
    out, grads = gradients(zero, form=form)
    ref, wanted = gradients(none, form=form)
    for name in ref:
        assert error(out[name], ref[name]) < 1e-13
    for name in wanted:
        assert error(grads[name], wanted[name]) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_weak_decays_sum_over_many_chunks(kind):
    """-1e-4 a token over 1000 tokens: differences of long float32 cumulative sums would show here."""
    check_gradients(make(kind, "BTHK", B=1, T=1000, H=1, K=8, V=8, strength=(1e-4, 1e-2)), torch.float32, form="chunk")


@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
def test_a_weak_stretch_after_a_strong_one(rank):
    """At a cumulative sum of -4e4 float32 resolves differences of 4e-3 only."""
    call = make("plain", rank, B=1, T=192, H=1, K=8, V=8, strength=(1e-3, 1e-2))
    decay = call.tensors["decay"].clone()
    decay[:, 3:60:2], decay[:, 70:100] = -STRONG, -50.0
    check_gradients(call.with_(decay=decay), torch.float32, form="chunk")


@pytest.mark.parametrize("strength", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("rank", ["H", "HK", "BTH", "BTHK"])
def test_the_gradient_of_a_strong_decay(rank, strength):
    """A reverse cumulative sum of q·dq − k·dk is off by 18 x at -5 a token."""
    call = make("plain", rank, B=1, T=300, K=16, V=16, strength=(strength, strength))
    call = call.to(torch.float32)
    grad, wanted = gradients(call, form="chunk")[1]["decay"], gradients(call.double(), backend="reference")[1]["decay"]
    assert wanted.any() and error(grad, wanted) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strength", ["five", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_strong_decays_beside_halves(kind, strength, dtype):
    call = undivided(with_resets(make(kind, "BTHK", B=1, T=100, K=16, V=8, strength=STRENGTHS[strength]), 0.02))
    check_values(call, dtype, form="chunk")
    check_gradients(call, dtype, form="chunk")


def before(ends: tuple[int, ...], T: int) -> Tensor:
    """Mask [B, T] of the tokens before their row's reset."""
    return torch.arange(T) < torch.tensor(ends)[:, None]


def walled(kind: str, rank: str, ats: tuple[int, ...], T: int) -> Call:
    """A call whose b-th row is reset at ``ats[b]``."""
    call = make(kind, rank, T=T, B=len(ats)).to(torch.float32)
    rows, fills = torch.arange(len(ats)), {"decay": -INF, "read": 0.0, "write": 0.0}
    changed = {n: call.tensors[n].index_put((rows, torch.tensor(ats)), torch.tensor(x)) for n, x in fills.items() if n in call.tensors}
    return call.with_(**changed)


def disturbed(call: Call, past: Tensor) -> Call:
    """Copy with different and much larger tokens in ``past`` [B, T]."""
    uniform = partial(torch.rand, generator=torch.Generator().manual_seed(9))
    other = make_like(call)
    other["v"] = other["v"] * 1e4
    other["decay"] = decays(tuple(call.tensors["decay"].shape), (1e-4, 90.0), uniform).float()
    changed = {n: torch.where(past.view(*past.shape, *[1] * (call.tensors[n].ndim - 2)), other[n], call.tensors[n]) for n in call.timed}
    return call.with_(**changed, **{n: other[n] * 1e4 for n in ("S", "z") if n in call.tensors})


def make_like(call: Call) -> dict[str, Tensor]:
    kind = next((k for k, n in (("beta", "beta"), ("erase", "read"), ("bonus", "bonus"), ("normalize", "z")) if n in call.tensors), "plain")
    B, T, H, V = call.tensors["v"].shape
    return make(kind, "BTHK", B=B, T=T, H=H, V=V, seed=77).to(torch.float32).tensors


def unseeing(kind: str, ats: tuple[int, ...], T: int) -> Tensor:
    """Mask [B, T] of the outputs that do not depend on tokens before the reset; bonus reads before the decay."""
    return ~before(tuple(at + (kind == "bonus") for at in ats), T)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_before_a_reset_changes_a_bit_after_it(kind, rank, form):
    ats, T = (1, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 127, 128, 129, 149), 150
    call, past, after = walled(kind, rank, ats, T), before(ats, T), unseeing(kind, ats, T)
    out, ref = disturbed(call, past)(form), call(form)
    changed = (out["o"] != ref["o"]).flatten(2).any(-1)
    assert bool((changed & past).any(-1).all())
    assert not (changed & after).any(), f"rows {(changed & after).any(-1).nonzero().flatten().tolist()} of resets at {ats}"
    same_bits({**out, "o": out["o"][after]}, {**ref, "o": ref["o"][after]}, f"after resets at {ats}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_crosses_a_reset(kind, rank, form):
    """Exactly zero, and later results keep their bits if earlier tokens change."""
    ats, T = (1, 16, 40, 64, 70), 100
    call, past, after = walled(kind, rank, ats, T), before(ats, T), unseeing(kind, ats, T)
    grads, others = (gradients_of(c, after, form) for c in (call, disturbed(call, past)))
    for name, grad in grads.items():
        if name in ("S", "z"):
            assert not grad.any(), name
        elif name in call.timed:
            assert not grad[past].any(), name
            assert torch.equal(grad[after], others[name][after]), name


def gradients_of(call: Call, read: Tensor, form: str) -> dict[str, Tensor]:
    """The gradients of the outputs of ``read`` [B, T] and of the final state."""
    leaves = {n: t.clone().requires_grad_() for n, t in call.tensors.items()}
    out = call.with_(**leaves)(form)
    loss = out["o"][read].square().sum() + out["S"].square().sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, allow_unused=True), strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["plain", "bonus", "normalize"])
def test_a_channel_is_reset_alone(kind, form):
    """Earlier writes of a channel are gone to the last bit after its reset, other channels keep theirs."""
    ats, T = (5, 16, 63, 64, 65, 90), 100
    call, past, after = make(kind, "BTHK", B=len(ats), T=T).to(torch.float32), before(ats, T), unseeing(kind, ats, T)
    decay, k = call.tensors["decay"].clone(), call.tensors["k"].clone()
    decay[torch.arange(len(ats)), torch.tensor(ats), :, 2] = -INF
    k[..., 2] *= torch.where(past, 1e3, 1.0)[..., None]
    call = call.with_(decay=decay)
    out, ref = call.with_(k=k)(form), call(form)
    same_bits({**out, "o": out["o"][after]}, {**ref, "o": ref["o"][after]}, f"after resets at {ats}")
    assert bool(((out["o"] != ref["o"]).flatten(2).any(-1) & ~after).any(-1).all())


@pytest.mark.parametrize("form", FORMS)
def test_with_erase_minus_infinity_alone_is_no_reset(form):
    """The read sees the state before its decay, so a reset needs read = write = 0."""
    call = make("erase", "BTHK", T=20)
    decay = call.tensors["decay"].clone()
    decay[:, 10] = -INF
    call = call.with_(decay=decay)
    assert error(call.with_(S=call.tensors["S"] + 1)(form)["S"], call(form)["S"]) > 1e-3
    check_gradients(call, torch.float64, form=form)


NAN = float("nan")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_row_and_head_and_in_the_future(kind, form):
    call = make(kind, "BTHK", B=3, T=200, H=3).to(torch.float32)
    clean = call(form)
    for name in call.timed:
        bad = call.tensors[name].clone()
        bad[1, 150, 1] = NAN
        out = call.with_(**{name: bad})(form)
        assert out["o"][1, 150:, 1].isnan().any(), name
        for n, t in out.items():
            spoiled = torch.zeros_like(t, dtype=torch.bool)
            spoiled[(1, slice(None), 1) if n == "o" else (1, 1)] = True
            if n == "o" and form != "parallel":  # the parallel form has one chunk
                spoiled[:, :128] = False
            assert torch.equal(t[~spoiled], clean[n][~spoiled]), f"NaN in {name} reached {n}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_gradient_stays_in_its_row_and_head(kind, form):
    """From an argument or from the gradient of an output."""
    call = make(kind, "BTHK", B=3, T=100, H=3).to(torch.float32)
    clean = gradients(call, form=form)[1]
    bad = call.tensors["v"].clone()
    bad[1, 50, 1] = NAN
    for grads in (gradients(call.with_(v=bad), form=form)[1], _nan_cotangent(call, form)):
        assert grads["v"][1, :, 1].isnan().any() or grads["q"][1, :, 1].isnan().any()
        for name, grad in grads.items():
            if name != "bonus":
                mine = torch.zeros_like(grad, dtype=torch.bool)
                mine[(1, 1) if name in ("S", "z") else (1, slice(None), 1)] = True
                assert torch.equal(grad[~mine], clean[name][~mine]), name
            else:
                assert torch.equal(grad[[0, 2]], clean[name][[0, 2]])


def _nan_cotangent(call: Call, form: str) -> dict[str, Tensor]:
    leaves = {n: t.clone().requires_grad_() for n, t in call.tensors.items()}
    out = call.with_(**leaves)(form)
    weights = {n: cotangent(t) for n, t in out.items()}
    weights["o"] = weights["o"].clone()
    weights["o"][1, 50, 1] = NAN
    grads = torch.autograd.grad(list(out.values()), list(leaves.values()), list(weights.values()))
    return dict(zip(leaves, grads, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_packed_sequence(kind, form):
    """Sequences within the same chunk of tokens keep their bits, also of gradients."""
    lengths = (10, 0, 12, 70, 3)
    call = make(kind, "BTHK", lengths=lengths).to(torch.float32)
    bad = call.tensors["v"].clone()
    bad[0, 15] = NAN
    (clean, clean_grads), (out, grads) = (gradients(c, form=form) for c in (call, call.with_(v=bad)))
    others = torch.tensor([t for t in range(95) if not 10 <= t < 22])
    assert out["o"][:, 15:22].isnan().any() and torch.equal(out["o"][:, others], clean["o"][:, others])
    kept = [0, 1, 3, 4]
    assert torch.equal(out["S"][kept], clean["S"][kept])
    same_elsewhere(grads, clean_grads, call, others, kept)
