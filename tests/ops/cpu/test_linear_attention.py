"""The kernels of ``linear_attention`` against the float64 reference: values and the gradients of all arguments, to the last column."""

from functools import partial

import pytest
import torch

from linattn.ops.cpu import linear_attention
from linattn.ops.inputs import Flat
from tests.ops import cases, errors
from tests.ops.cases import KINDS, RANKS, Call, disturbed, gradients, make
from tests.ops.errors import admitted, check_gradients, check_values, error, same_bits
from tests.ops.test_decays import INF, NAN, STRONG, WEAK, undivided, with_resets
from tests.ops.test_identities import similar_keys

CPU = {"backend": "cpu"}
CLOSE = 3e-6  # tolerance of short sums in float32 against float64
PACKED = (5, 0, 1, 64, 0, 7, 66, 0)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(isa, kind, rank):
    """More than a chunk, grouped heads, sizes that are no multiples of a vector."""
    call = undivided(make(kind, rank, B=2, T=71, H=2, Hk=1, K=20, V=37))
    check_gradients(call, torch.float32, limit=CLOSE, **CPU)


@pytest.mark.parametrize(
    ("B", "T", "H", "Hk", "K", "V"),
    [(1, 1, 1, 1, 1, 1), (3, 2, 2, 2, 5, 3), (1, 4, 9, 3, 16, 16), (2, 65, 4, 2, 64, 64), (1, 130, 1, 1, 70, 129), (1, 3, 1, 1, 130, 8)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes(native, kind, B, T, H, Hk, K, V):
    """One head is split by columns between tasks, and its sums over columns are combined."""
    check_gradients(undivided(make(kind, "BTHK", B=B, T=T, H=H, Hk=Hk, K=K, V=V)), torch.float32, limit=CLOSE, **CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_a_group_together(native, kind, dtype):
    """One task sums the gradients of their shared key; packed sequences have various lengths, including 0."""
    whole, packed = make(kind, "BTH", B=3, T=70, H=9, Hk=3, K=20, V=12), make(kind, "BTHK", H=4, Hk=2, K=9, V=6, lengths=PACKED)
    for call in map(undivided, (whole, packed)):
        check_gradients(call, dtype, limit=CLOSE if dtype == torch.float32 else None, **CPU)


@pytest.mark.parametrize("rank", ["none", "BTH", "HK"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed(isa, kind, rank):
    check_gradients(undivided(make(kind, rank, H=2, K=9, V=6, lengths=PACKED)), torch.float32, limit=CLOSE, **CPU)


@pytest.mark.parametrize("kind", ["beta", "erase"])
def test_few_keys_packed(isa, kind):
    """Under a rule that erases, blocks of one token, and states saved every 16."""
    check_gradients(undivided(make(kind, "BTHK", H=2, K=3, V=6, lengths=PACKED)), torch.float32, limit=CLOSE, **CPU)


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("kind", ["beta", "erase"])
def test_what_is_left_of_an_erased_state(native, kind, keys):
    """Each token leaves 2^-8 of one channel, so four leave 2^-32 of one or 2^-16 of two, to the precision of a factor."""
    call = make(kind, "none", B=1, T=9, H=2, K=keys, V=5)
    key = torch.eye(keys, dtype=torch.float64)[torch.arange(9) % keys].view(1, 9, 1, keys).expand(1, 9, 2, keys).contiguous()
    share = 1 - 2.0**-8 * (1 + torch.rand(1, 9, 2, dtype=torch.float64))
    call = call.with_(**({"k": key, "beta": share} if kind == "beta" else {"read": key, "write": -share[..., None] * key}))
    run = partial(gradients, **CPU)
    ratios = errors.ratios(call, torch.float32, run=run, exact="reference", outputs=("S",))
    assert max(ratios.values()) <= 1, ratios


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("outputs", [("o",), ("S",), ("z", "denominator")])
def test_gradients_of_some_outputs(native, outputs, initial):
    call = make("normalize", "BTH", T=70, initial=initial).set(normalize="return").to(torch.float32)
    grads = gradients(call, outputs, **CPU)[1]
    for name, wanted in gradients(call.double(), outputs, backend="reference")[1].items():
        assert error(grads[name], wanted) <= CLOSE, name


@pytest.mark.parametrize("rank", ["BTH", "HK"])
@pytest.mark.parametrize("kind", KINDS)
def test_views_that_turn_the_signs(native, kind, rank):
    """Imaginary parts of conjugates are negative views, of gradients too."""

    def results(view):
        leaves = {n: t.detach().requires_grad_() for n, t in call.tensors.items()}
        out = call.with_(**{n: view(t) for n, t in leaves.items()})(**CPU)
        grads = torch.autograd.grad(list(out.values()), list(leaves.values()), [view(cases.cotangent(o)) for o in out.values()])
        return out, dict(zip(leaves, grads, strict=True))

    call = make(kind, rank, B=1, T=70, H=2, Hk=1, K=9, V=6).to(torch.float32)
    for turned, plain in zip(results(cases.turned), results(torch.clone), strict=True):
        same_bits(turned, plain)


@pytest.mark.parametrize("normalize", [True, 0.0, 0.5])
def test_normalized(native, normalize):
    check_gradients(make("normalize", "BTH", T=40, Hk=1).set(normalize=normalize, scale=0.3), torch.float32, limit=1e-5, **CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_halves(isa, kind, dtype):
    call = make(kind, "BTHK", B=1, T=70, H=2, Hk=1, K=33, V=24)
    assert admitted(call.to(dtype))
    check_values(call, dtype, **CPU)
    check_gradients(call, dtype, **CPU)
    check_gradients(call, dtype, decay=dtype, **CPU)


@pytest.mark.parametrize("rank", ["H", "HK", "BTH", "BTHK"])
@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_every_strength_with_resets(native, kind, rank):
    share = 0.1 if rank.startswith("BT") else 0.4
    call = undivided(with_resets(make(kind, rank, B=1, T=80, H=4, K=18, V=5, strength=(WEAK, STRONG), seed=4), share))
    assert bool(call.tensors["decay"].isinf().any()) and admitted(call.to(torch.float32))
    check_gradients(call, torch.float32, **CPU)


@pytest.mark.parametrize("strength", [1.0, 5.0, 30.0, INF])
@pytest.mark.parametrize("kind", KINDS)
def test_one_strength(native, kind, strength):
    """Including the decay's gradient, which is small for strong decays."""
    call = undivided(make(kind, "BTHK", B=1, T=40, H=1, K=18, V=5))
    check_gradients(call.with_(decay=torch.full_like(call.tensors["decay"], -strength)), torch.float32, **CPU)


@pytest.mark.parametrize("rank", ["H", "HK"])
def test_slow_decays_do_not_drift(native, rank):
    """A factor near 1 is rounded in the same direction at every step."""
    call = make("plain", rank, B=1, T=20_000, H=2, K=4, V=3, strength=(3e-6, 1e-4)).set(scale=1.0)
    call = call.with_(v=call.tensors["v"] + 1.0, k=call.tensors["k"] + 1.0).to(torch.float32)
    out, ref = call(**CPU), call.double()(backend="torch")
    assert error(out["S"], ref["S"]) < 5e-6 and error(out["o"], ref["o"]) < 5e-6


WALLS = (1, 2, 3, 4, 31, 63, 64, 65, 70)


def walled(kind: str, rank: str) -> tuple[Call, torch.Tensor]:
    """A call whose h-th head is reset at ``WALLS[h]``, and a mask [T, H] of the tokens before."""
    call = make(kind, rank, B=1, T=75, H=len(WALLS), K=18, V=17).to(torch.float32)
    wall = torch.arange(75)[:, None] == torch.tensor(WALLS)
    changed = {"decay": call.tensors["decay"].masked_fill(wall if rank == "BTH" else wall[..., None], -INF)}
    changed |= {n: call.tensors[n].masked_fill(wall[..., None], 0.0) for n in ("read", "write") if n in call.tensors}
    return call.with_(**changed), torch.arange(75)[:, None] < torch.tensor(WALLS)


@pytest.mark.parametrize("rank", ["BTH", "BTHK"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_before_a_reset_changes_a_bit_after_it(isa, kind, rank):
    call, before = walled(kind, rank)
    late = 1 if kind == "bonus" else 0  # bonus reads before the decay
    out, other = call(**CPU), disturbed(call, before)(**CPU)
    for h, at in enumerate(WALLS):
        assert not torch.equal(out["o"][:, :at, h], other["o"][:, :at, h])
        assert torch.equal(out["o"][:, at + late :, h], other["o"][:, at + late :, h]), f"after a reset at {at}"
    same_bits({n: t for n, t in out.items() if n != "o"}, {n: t for n, t in other.items() if n != "o"})


@pytest.mark.parametrize(("rank", "kind"), [("BTH", "plain"), ("BTHK", "plain"), ("BTHK", "beta"), ("BTH", "erase")])
def test_no_gradient_crosses_a_reset(native, kind, rank):
    """Exactly zero, and later gradients keep their bits if earlier tokens change."""
    call, before = walled(kind, rank)
    grads, others = (after(c, before) for c in (call, disturbed(call, before)))
    assert not grads["S"].any()
    for name in call.timed:
        grad, mask = grads[name], before if grads[name].ndim == 3 else before[..., None]
        assert grad.any() and torch.equal(grad.masked_fill(mask, 0.0), others[name].masked_fill(mask, 0.0)), name
        assert not grad.masked_fill(~mask, 0.0).any(), name


def after(call: Call, before: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the outputs after the resets and of the final state."""
    leaves = {n: t.clone().requires_grad_() for n, t in call.tensors.items()}
    out = call.with_(**leaves)(**CPU)
    loss = out["o"].masked_fill(before[..., None], 0.0).square().sum() + out["S"].square().sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


@pytest.mark.parametrize("rank", ["none", "BTHK"])
def test_similar_keys_at_beta_two(isa, rank):
    """A truncated or doubled series in place of the substitution errs by 1e18 here."""
    call = similar_keys(130)
    if rank != "none":
        call = call.with_(decay=make("beta", rank, B=1, T=130, H=1, K=64, strength=(1e-4, 0.01)).tensors["decay"])
    check_gradients(call, torch.float32, **CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_stays_in_its_row_and_head_and_in_the_future(native, kind):
    call = make(kind, "BTHK", B=3, T=70, H=3).to(torch.float32)
    clean = call(**CPU)
    for name in call.timed:
        bad = call.tensors[name].clone()
        bad[1, 50, 1] = NAN
        out = call.with_(**{name: bad})(**CPU)
        assert out["o"][1, 50:, 1].isnan().any(), name
        for n, t in out.items():
            spoiled = torch.zeros_like(t, dtype=torch.bool)
            spoiled[(1, slice(48, None), 1) if n == "o" else (1, 1)] = True  # of its block of four
            assert torch.equal(t[~spoiled], clean[n][~spoiled]), f"NaN in {name} reached {n}"


def laid_out(layout: str, call: Call) -> Call:
    """Copy with other strides and offsets."""
    t = call.tensors
    if layout == "heads first":
        return call.with_(**{n: t[n].transpose(1, 2).contiguous().transpose(1, 2) for n in call.timed})
    if layout == "one projection":
        return call.with_(**{n: torch.cat([t[n], t[n] * NAN], -1)[..., : t[n].shape[-1]] for n in "qkv"})
    if layout == "unaligned":
        return call.with_(**{n: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) for n, x in t.items()})
    return call.with_(**{n: x.transpose(-1, -2).contiguous().transpose(-1, -2) for n, x in t.items() if x.ndim > 1})


@pytest.mark.parametrize("layout", ["heads first", "one projection", "unaligned", "channels far apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_layouts_change_no_bit(native, kind, layout):
    call = make(kind, "BTHK", T=20, K=18, V=20).to(torch.float32)
    for one, two in zip(gradients(call, **CPU), gradients(laid_out(layout, call), **CPU), strict=True):
        same_bits(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_runs_change_no_bit(isa, kind, threads):
    for call in (make(kind, "BTHK", B=1, T=70, H=3, K=20, V=40), make(kind, "BTH", H=1, K=8, V=70, lengths=PACKED)):
        runs = []
        for count in (1, 2, 5, 2):
            threads(count)
            runs.append(gradients(call.to(torch.float32), **CPU))
        for values, grads in runs[1:]:
            same_bits(values, runs[0][0])
            same_bits(grads, runs[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_larger_than_the_caches(isa, dtype):
    """They are written by non-temporal stores."""
    random = torch.Generator().manual_seed(0)
    t = {n: torch.randn(1, 4500, 4, 4 if n in "qk" else 67, generator=random, dtype=torch.float64) for n in "qkv"}
    call = Call(t | {"decay": -torch.rand(1, 4500, 4, generator=random, dtype=torch.float64)})
    for part in (call, call.with_(v=t["v"][..., :64].contiguous())):
        out, ref = part.to(dtype)(**CPU), part.to(dtype).double()()
        assert error(out["o"], ref["o"]) < (1e-6 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_the_whole(isa, kind):
    """Token by token, with the state passed on."""
    call = make(kind, "BTHK", B=2, T=6, K=18, V=20, H=2).to(torch.float32)
    whole, state, outputs = call(**CPU), {n: call.tensors[n] for n in cases.ROWS if n in call.tensors}, []
    for t in range(6):
        out = call.tokens(t, t + 1).with_(**state)(**CPU)
        state = {n: out[n] for n in state}
        outputs.append(out["o"])
    assert error(torch.cat(outputs, 1), whole["o"]) < 1e-6 and error(state["S"], whole["S"]) < 1e-6


def test_one_backward_pass_keeps_one_state_in_64_tokens(native):
    """Beyond arguments, outputs and gradients."""
    x = linear_attention._Call(Flat(*(torch.zeros(1, 6400, 8, 64) for _ in "qkv"), *[None] * 8, 1.0, False))
    assert x.kept == (100, 8, 64, 64)


def test_a_part_of_the_columns_is_a_task_where_there_are_few_heads(native):
    def parts(B: int, H: int, V: int) -> int:
        return linear_attention._Call(Flat(*(torch.zeros(B, 1, H, n) for n in (4, 4, V)), *[None] * 8, 1.0, False)).parts

    assert [parts(1, 1, 64), parts(1, 1, 65), parts(2, 4, 64), parts(1, 3, 256), parts(1, 1, 16)] == [2, 3, 1, 3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_long(isa, kind, rank):
    call = make(kind, rank, B=1, T=8192, H=1, K=16, V=8, strength=(1e-4, 0.5))
    check_values(call, torch.float32, at_any_length=True, **CPU)
