"""Optional arguments, mixed dtypes, memory layouts, and bit-for-bit invariances."""

from itertools import product

import pytest
import torch

from linattn.ops.triton import launch, run
from tests.ops import cases
from tests.ops.cases import KINDS, Call, make
from tests.ops.errors import error, same_bits
from tests.ops.triton import device
from tests.ops.triton.device import HALVES, INTERPRETED, LATER, SIZE, check, check_tame, first, gradients, here

T = 34 if INTERPRETED else 1100  # two segments


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_state_is_used(kind):
    """The outputs get no gradient."""
    check(make(kind, "BTHK", B=1, T=T, H=1, **SIZE), torch.float32, outputs=("S", "z"))


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_outputs_are_used(kind):
    check(make(kind, "BTH", B=1, T=T, H=1, **SIZE, initial=False), torch.float32, outputs=("o",))


@pytest.mark.parametrize("kind", ["plain", "normalize"])
def test_the_state_is_not_returned(kind):
    call = make(kind, "BTHK", B=1, T=T, H=1, **SIZE)
    check(call.set(return_state=False), torch.float32)


@pytest.mark.parametrize("kind", [*KINDS[:2], *(pytest.param(kind, marks=LATER) for kind in KINDS[2:])])
def test_two_runs_agree_bit_for_bit(kind):
    """Also with other contents of uninitialised memory."""
    call = here(make(kind, "BTHK", lengths=(T, 0, 3), H=2, Hk=1, **SIZE)).to(HALVES[-1])
    (out, grads), (again, others) = gradients(call), cases.gradients(call, backend="triton")
    same_bits(out, again)
    same_bits(grads, others)


@pytest.mark.parametrize("kind", ["beta", "erase", "bonus"])
def test_wide_arguments_beside_halves(kind):
    """They are not rounded: the result is that of their float32 values."""

    class Mixed(Call):
        def to(self, dtype, decay=None):
            rounded = super().to(dtype, decay)
            if dtype == torch.float64:
                return rounded
            wide = {n: self.tensors[n].float() for n in ("beta", "read", "write", "bonus") if n in self.tensors}
            return Call({**rounded.tensors, **wide}, rounded.options)

    call = make(kind, "BTH", B=1, T=20, H=1, **SIZE)
    check(Mixed(call.tensors, call.options), HALVES[-1])


@pytest.mark.parametrize("rank", ["HK", "BTH", "BTHK"])
def test_decay_may_be_half_too(rank):
    check(make("plain", rank, B=1, T=20, H=1, **SIZE), HALVES[-1], decay=HALVES[-1])


@pytest.mark.parametrize("scale", [1.0, -0.3])
def test_scale(scale):
    check(make("plain", "BTHK", B=1, T=20, H=1, **SIZE).set(scale=scale), torch.float32)


LAYOUTS = {
    "heads before time": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "one projection": lambda t: torch.cat([t, t.new_full(t.shape, torch.nan)], -1)[..., : t.shape[-1]],
    "time before rows": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "the last dimension apart": lambda t: torch.stack([t, t.new_full(t.shape, torch.nan)], -1)[..., 0],
    "every second token": lambda t: torch.stack([t, t.new_full(t.shape, torch.nan)], 2).flatten(1, 2)[:, ::2],
}


@pytest.mark.parametrize(("kind", "layout"), first(["beta", ("erase", "every second token")], product(["beta", "erase"], LAYOUTS)))
def test_any_layout(kind, layout):
    """Other strides, with NaN in gaps, give equal results, also for cotangents."""
    call = here(make(kind, "BTHK" if kind == "beta" else "BTH", B=2, T=7, H=2, **SIZE)).to(torch.float32)
    strided = call.with_(**{n: LAYOUTS[layout](call.tensors[n]) for n in call.timed})
    out, grads = both(call, lambda t: t)
    others, theirs = both(strided, LAYOUTS[layout])
    same_bits(out, others)
    same_bits(grads, theirs)


def both(call: Call, layout) -> tuple[dict, dict]:
    """Values and gradients, with leaves and the cotangent of o in this layout."""
    leaves = {n: t.detach().requires_grad_() for n, t in call.tensors.items()}
    with device.poisoned():
        out = call.with_(**leaves)(backend="triton")
        weights = [layout(cases.cotangent(t)) if n == "o" else cases.cotangent(t) for n, t in out.items()]
        grads = torch.autograd.grad(list(out.values()), list(leaves.values()), weights)
    return {n: t.detach() for n, t in out.items()}, dict(zip(leaves, grads, strict=True))


def test_expanded_arguments():
    """One row of q for all, one channel of decay for all: strides of 0."""
    call = here(make("plain", "BTHK", B=2, T=18, H=2, **SIZE)).to(torch.float32)
    q, decay = call.tensors["q"][:1].expand_as(call.tensors["q"]), call.tensors["decay"][..., :1].expand_as(call.tensors["decay"])
    expanded = call.with_(q=q, decay=decay)
    same_bits(device.values(expanded), device.values(call.with_(q=q.contiguous(), decay=decay.contiguous())))


@pytest.mark.parametrize("wanted", ["q", "v", "decay", "beta", "S"])
def test_the_gradient_of_one_argument(wanted):
    """Others are not computed; kernels without them may round differently."""
    call = here(make("beta", "BTHK", B=1, T=20, H=1, **SIZE)).to(torch.float32)
    whole = gradients(call)[1][wanted]
    leaf = call.tensors[wanted].clone().requires_grad_()
    with device.poisoned():
        out = call.with_(**{wanted: leaf})(backend="triton")
        (mine,) = torch.autograd.grad(list(out.values()), leaf, [cases.cotangent(t) for t in out.values()])
    assert error(mine, whole) < 1e-6


FIXED = [("H", torch.float32), ("BTH", torch.float32), *(("BTH", dtype) for dtype in HALVES), *(("none", dtype) for dtype in HALVES)]
LONG = dict(B=1, T=100, H=1, K=5, V=18) if INTERPRETED else dict(lengths=(3000, 0, 1, 2500), H=2, K=64, V=128)


@pytest.mark.parametrize(("rank", "dtype"), FIXED)
def test_a_decay_that_is_no_parameter(rank, dtype):
    """Without a gradient of the decay those of q, k and v are the recurrence, exchanged and reversed, also across segments."""

    def run(call: Call, outputs):
        leaves = {n: t.detach().clone().requires_grad_() for n, t in call.tensors.items() if n != "decay"}
        with device.poisoned():
            out = call.with_(**leaves)(backend="triton")
        grads = torch.autograd.grad(list(out.values()), list(leaves.values()), [cases.cotangent(t) for t in out.values()])
        return {n: t.detach() for n, t in out.items()}, dict(zip(leaves, grads, strict=True))

    check(make("plain", rank, **LONG, strength=(1e-3, 0.5)), dtype, run=run)


def test_rows_and_sequences_do_not_depend_on_their_company():
    call = here(make("beta", "BTHK", lengths=(20, 0, 33, 5), H=1, **SIZE)).to(torch.float32)
    parts = [device.values(call.sequence(n)) for n in (0, 2, 3)]
    out = device.values(call)
    assert torch.equal(out["o"], torch.cat([p["o"] for p in parts], 1))
    assert torch.equal(out["S"][[0, 2, 3]], torch.cat([p["S"] for p in parts])) and torch.equal(out["S"][1], call.tensors["S"][1])


@pytest.mark.parametrize(("kind", "packed"), [("plain", False), ("beta", True), *(pytest.param(k, True, marks=LATER) for k in KINDS[2:])])
def test_more_rows_and_sequences_than_a_grid_has_room_for(kind, packed, monkeypatch):
    """They take several launches of the same programs; here the grid is limited to few."""
    lengths = (3, T, 0, 5, T, 1) if packed else None
    call = here(make(kind, "BTHK" if kind == "beta" else "none", B=5, T=7, lengths=lengths, H=1, **SIZE)).to(torch.float32)
    wanted = gradients(call)
    launches, launch_one = [], launch.Recorder.launch

    def launched(self, kernel, grid, *rest, **constants):
        launches.append(grid[1])
        return launch_one(self, kernel, grid, *rest, **constants)

    monkeypatch.setattr(launch.Recorder, "launch", launched)
    monkeypatch.setattr(launch, "_programs", {})  # drops programs recorded before
    monkeypatch.setattr(run, "MOST", 2)
    found = gradients(call)
    assert max(launches) == 2
    for mine, theirs in zip(found, wanted, strict=True):
        same_bits(mine, theirs)


def test_a_split_sequence_is_the_sequence():
    call = make("erase", "BTHK", B=1, T=T, H=1, **SIZE)
    at = T // 3

    def run(call: Call, outputs):
        """Two calls, the second from the state of the first."""
        leaves = {n: t.detach().clone().requires_grad_() for n, t in call.tensors.items()}
        whole = call.with_(**leaves)
        first = whole.tokens(0, at)(backend="triton")
        second = whole.tokens(at, T).with_(S=first["S"])(backend="triton")
        out = {"o": torch.cat([first["o"], second["o"]], 1), "S": second["S"]}
        grads = torch.autograd.grad(list(out.values()), list(leaves.values()), [cases.cotangent(t) for t in out.values()])
        return {n: t.detach() for n, t in out.items()}, dict(zip(leaves, grads, strict=True))

    check_tame(call, torch.float32, run=run)
