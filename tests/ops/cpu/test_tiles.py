"""Chunks of ``linear_attention`` by AMX tiles and AVX512-BF16: within the tolerances of bfloat16, values and gradients."""

import pytest
import torch

from linattn.ops.cpu import library
from tests.ops.cases import Call, gradients, make
from tests.ops.errors import admitted, check_gradients, check_values, same_bits
from tests.ops.test_decays import INF, NAN, STRONG, WEAK, with_resets
from tests.ops.test_identities import similar_keys

pytestmark = pytest.mark.usefixtures("tiles")
CPU = {"backend": "cpu"}
RANKS = ("none", "H", "BTH")
KINDS = ("plain", "beta")
BFLOAT16 = torch.bfloat16


def on_vectors(call: Call) -> tuple[dict, dict]:
    with library.lowered("avx512"):
        return gradients(call, **CPU)


@pytest.mark.parametrize(
    ("B", "T", "H", "Hk", "K", "V"),
    [
        (2, 71, 2, 1, 20, 37), (1, 200, 2, 2, 64, 64), (1, 130, 1, 1, 70, 129),
        (1, 32, 9, 3, 16, 16), (2, 129, 4, 4, 128, 48), (3, 70, 6, 3, 33, 20),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(tiles, kind, rank, B, T, H, Hk, K, V):
    call = make(kind, rank, B=B, T=T, H=H, Hk=Hk, K=K, V=V)
    check_values(call, BFLOAT16, **CPU)
    check_gradients(call, BFLOAT16, **CPU)
    here, there = gradients(call.to(BFLOAT16), **CPU), on_vectors(call.to(BFLOAT16))
    outputs, grads = ({name for name in one if not torch.equal(one[name], two[name])} for one, two in zip(here, there, strict=True))
    # Close, but by other code: all but the delta rule's forward pass by dot products, and its sums of decays.
    assert ("o" in outputs) == (kind == "plain" or tiles == "amx")
    assert ({"q", "k", "v"} <= grads) == (kind == "plain" or rank != "H")


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("outputs", [("o",), ("S",)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_some_outputs(kind, outputs, initial):
    call = make(kind, "BTH", T=70, K=32, V=16, initial=initial).to(BFLOAT16)
    grads = gradients(call, outputs, **CPU)[1]
    for name, wanted in gradients(call.double(), outputs, backend="reference")[1].items():
        assert (grads[name] - wanted).norm() <= (0.006 if kind == "plain" else 0.015) * wanted.norm(), name


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed(kind, rank):
    call = make(kind, rank, H=2, Hk=1, K=33, V=24, lengths=(5, 0, 1, 64, 0, 130, 66, 0))
    check_values(call, BFLOAT16, **CPU)
    check_gradients(call, BFLOAT16, **CPU)


@pytest.mark.parametrize("rank", ["H", "BTH"])
@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_every_strength_with_resets(kind, rank):
    call = with_resets(make(kind, rank, B=1, T=140, H=4, K=32, V=16, strength=(WEAK, STRONG), seed=4), 0.1 if rank == "BTH" else 0.4)
    assert bool(call.tensors["decay"].isinf().any()) and admitted(call.to(BFLOAT16))
    check_values(call, BFLOAT16, **CPU)
    check_gradients(call, BFLOAT16, **CPU)
    check_gradients(call, BFLOAT16, decay=BFLOAT16, **CPU)


@pytest.mark.parametrize("strength", [1e-5, 1.0, 5.0, 30.0, INF])
@pytest.mark.parametrize("kind", KINDS)
def test_one_strength(kind, strength):
    """Including the decay's gradient, which is small for strong decays."""
    call = make(kind, "BTH", B=1, T=80, H=1, K=32, V=16)
    check_gradients(call.with_(decay=torch.full_like(call.tensors["decay"], -strength)), BFLOAT16, **CPU)


def test_slow_decays_do_not_drift():
    call = make("plain", "H", B=1, T=20_000, H=2, K=16, V=16, strength=(3e-6, 1e-4)).set(scale=1.0)
    call = call.with_(v=call.tensors["v"] + 1.0, k=call.tensors["k"] + 1.0).to(BFLOAT16)
    out, ref = call(**CPU), call.double()(backend="torch")
    assert (out["o"] - ref["o"]).norm() < 4e-3 * ref["o"].norm() and (out["S"] - ref["S"]).norm() < 1e-3 * ref["S"].norm()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_crosses_a_reset(kind):
    """Earlier tokens change no later bit, and get no gradient."""
    call = make(kind, "BTH", B=1, T=150, H=1, K=32, V=32).to(BFLOAT16)
    for wall in (1, 31, 64, 100):
        decay = call.tensors["decay"].clone()
        decay[:, wall] = -INF
        one = call.with_(decay=decay)
        by = {"v": -100, "k": -100 if kind == "plain" else -0.5}  # longer keys would make the delta rule overflow
        other = one.with_(**{n: torch.cat([one.tensors[n][:, :wall] * by[n], one.tensors[n][:, wall:]], 1) for n in by})
        (out, first), (changed, second) = ((c(**CPU), after(c, wall)) for c in (one, other))
        assert torch.equal(out["o"][:, wall:], changed["o"][:, wall:]) and torch.equal(out["S"], changed["S"])
        assert not torch.equal(out["o"][:, :wall], changed["o"][:, :wall])
        for name, grad in first.items():
            if name == "S":
                assert not grad.any()
            else:
                assert grad[:, wall:].any() and torch.equal(grad[:, wall:], second[name][:, wall:]), name
                assert not grad[:, : wall + (name == "decay")].any(), name


def after(call: Call, wall: int) -> dict[str, torch.Tensor]:
    """Gradients of the outputs after the reset and of the final state."""
    leaves = {n: t.clone().requires_grad_() for n, t in call.tensors.items()}
    out = call.with_(**leaves)(**CPU)
    loss = out["o"][:, wall:].float().square().sum() + out["S"].square().sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_row_and_head_and_chunk_and_in_the_future(kind):
    call = make(kind, "BTH", B=2, T=200, H=2, K=16, V=16).to(BFLOAT16)
    clean = call(**CPU)
    for name in call.timed:
        bad = call.tensors[name].clone()
        bad[1, 100, 1] = NAN
        out = call.with_(**{name: bad})(**CPU)
        assert out["o"][1, 100:, 1].isnan().any(), name
        for n, t in out.items():
            spoiled = torch.zeros_like(t, dtype=torch.bool)
            spoiled[(1, slice(64, None), 1) if n == "o" else (1, 1)] = True
            assert torch.equal(t[~spoiled], clean[n][~spoiled]), f"NaN in {name} reached {n}"


@pytest.mark.parametrize(("B", "H", "Hk"), [(1, 3, 3), (4, 6, 2)], ids=["columns shared out", "heads of a group together"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_runs_and_layouts_change_no_bit(kind, B, H, Hk, threads):
    call = make(kind, "BTH", B=B, T=100, H=H, Hk=Hk, K=40, V=72).to(BFLOAT16)
    before = gradients(call, **CPU)
    t = call.tensors
    heads_first = call.with_(**{n: t[n].transpose(1, 2).contiguous().transpose(1, 2) for n in call.timed})
    beside_others = call.with_(**{n: torch.cat([t[n][..., :1], t[n]], -1)[..., 1:] for n in "qkv"})  # at odd addresses too
    for count, same in ((1, call), (2, call), (5, call), (2, heads_first), (2, beside_others)):
        threads(count)
        for one, two in zip(before, gradients(same, **CPU), strict=True):
            same_bits(one, two)


def test_from_chunk_to_chunk_the_state_keeps_its_digits():
    """Rounding at every chunk would lose them, here with all writes at the start."""
    call = make("plain", "none", B=1, T=64 * 40, H=1, K=16, V=16).to(BFLOAT16)
    call = call.with_(k=call.tensors["k"] * (torch.arange(64 * 40) < 64)[:, None, None])
    same = call.tokens(0, 64)(**CPU)["S"]
    assert torch.equal(call(**CPU)["S"], same)


@pytest.mark.parametrize("rank", ["none", "BTH"])
def test_similar_keys_at_beta_two(rank):
    """Errors of all chunks accumulate without decay, so writes need more than bfloat16's precision."""
    call = similar_keys(200)
    if rank != "none":
        call = call.with_(decay=make("beta", rank, B=1, T=200, H=1, K=64, strength=(1e-4, 0.01)).tensors["decay"])
    assert admitted(call.to(BFLOAT16))
    check_values(call, BFLOAT16, **CPU)
    check_gradients(call, BFLOAT16, **CPU)
    rounded = call.to(BFLOAT16)
    found, exact = gradients(rounded, ("S",), **CPU), gradients(rounded.double(), ("S",), backend="reference")
    for one, wanted in zip(found, exact, strict=True):  # the last state, and the gradient of the first one
        assert (one["S"] - wanted["S"]).norm() < 1e-4 * wanted["S"].norm()


def test_the_gradient_of_a_constant_decay_is_summed_on_vectors():
    """The sum cancels too much under the delta rule for bfloat16 operands."""
    call = make("beta", "H", B=1, T=129, H=2, Hk=2, K=64, V=64, strength=(1e-4, 0.01)).to(BFLOAT16)
    grads, wanted = gradients(call, **CPU)[1], gradients(call.double(), backend="reference")[1]
    assert (grads["decay"] - wanted["decay"]).norm() < 1e-4 * wanted["decay"].norm()


def test_beta_of_zero_has_a_gradient():
    """It follows from the prediction error, not from the write."""
    call = make("beta", "BTH", B=1, T=100, H=2, K=32, V=32)
    call = call.with_(beta=call.tensors["beta"] * (torch.arange(100) % 3 > 0)[:, None])
    check_gradients(call, BFLOAT16, **CPU)


@pytest.mark.parametrize(
    "call",
    [
        make("plain", "BTH", T=100, K=16, V=16).to(torch.float32),
        make("plain", "BTH", T=100, K=16, V=16).to(torch.float16),
        make("plain", "BTHK", T=100, K=16, V=16).to(BFLOAT16),
        make("beta", "BTHK", T=100, K=16, V=16).to(BFLOAT16),
        make("beta", "BTH", T=100, K=16, V=16).to(torch.float32),
        make("erase", "BTH", T=100, K=16, V=16).to(BFLOAT16),
        make("normalize", "BTH", T=100, K=16, V=16).to(BFLOAT16),
        make("plain", "BTH", T=31, K=16, V=16).to(BFLOAT16),
    ],
    ids=["float32", "float16", "channels", "delta, channels", "delta, float32", "erase", "normalized", "short"],
)  # fmt: skip
def test_what_runs_on_vectors(call):
    for one, two in zip(on_vectors(call), gradients(call, **CPU), strict=True):
        same_bits(one, two)
