"""Changing one element of an argument changes exactly the results that depend on it."""

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.ops import definition
from tests.ops.cases import FORMS, KINDS, RANKS, Call, cotangent, make
from tests.ops.errors import same_bits
from tests.sweeps import halved

GROUP = 2  # heads of v for one head of q and k
LENGTHS = (3, 0, 66, 1)
AT = (0, 1, 2, 40, 63, 64, 69)


@cache
def base(kind: str, rank: str, lengths: tuple[int, ...] | None, form: str) -> tuple[Call, dict[str, Tensor]]:
    # Weak decays: the first write is still visible at the end.
    call = make(kind, rank, T=70, H=4, Hk=2, K=3, V=3, lengths=lengths, strength=(0.01, 0.1))
    return call, call(form)


@cache
def reach(kind: str, rank: str, lengths: tuple[int, ...] | None, name: str, index: tuple[int, ...]) -> dict[str, Tensor]:
    """Mask of results that depend on one element: the equations over booleans instead of numbers."""
    call = base(kind, rank, lengths, "recurrent")[0]
    marks = {n: torch.zeros_like(t) for n, t in call.tensors.items()}
    marks[name][index] = 1.0
    x = {n: t.bool() for n, t in definition.repeated(call.with_(**marks)).items()}
    if kind == "normalize":
        x["v"][..., -1] = False  # the column of ones for z
    o, states = torch.zeros_like(x["v"][..., 0, :]), x["S"].clone()
    for n, (row, start, stop) in enumerate(spans(call)):
        for t in range(start, stop):
            token = {key: y[row, t] for key, y in x.items() if key not in ("S", "bonus")}
            o[row, t], states[n] = depends(token, x["bonus"][0, 0] if "bonus" in x else None, states[n])
    if kind != "normalize":
        return {"o": o, "S": states}
    return {"o": o[..., :-1] | o[..., -1:], "S": states[..., :-1], "z": states[..., -1]}


def depends(x: dict[str, Tensor], bonus: Tensor | None, s: Tensor) -> tuple[Tensor, Tensor]:
    """One token [H, K, V]: the output [H, V] and the next state."""
    faded = s | x["decay"] if "decay" in x else s
    value = x["v"] | x["beta"] | (x["k"] | faded).any(-2, keepdim=True) if "beta" in x else x["v"]
    after = faded | x["k"] | value
    if "read" in x:
        after = after | x["write"] | (x["read"] | s).any(-2, keepdim=True)
    seen = after if bonus is None else s | bonus | x["k"] | x["v"]
    return (x["q"] | seen).any(-2), after


def spans(call: Call) -> list[tuple[int, int, int]]:
    """Row and token range of every state."""
    B, T = call.tensors["v"].shape[:2]
    if "cu_seqlens" not in call.options:
        return [(b, 0, T) for b in range(B)]
    ends = call.options["cu_seqlens"].tolist()
    return [(0, a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def check(call: Call, out: dict[str, Tensor], wanted: dict[str, Tensor], change: tuple[str, tuple[int, ...], str]) -> None:
    name, index, form = change
    changed = call.tensors[name].clone()
    changed[index] = changed[index] * 0.5 - (0.0 if name == "decay" else 0.3)
    mutant = call.with_(**{name: changed})(form)
    for result, before in out.items():
        differs, where = mutant[result] != before, f"{name}{list(index)} in {result}"
        still, other = wanted[result] & ~differs, differs & ~wanted[result]
        assert not still.any(), f"{where}: {int(still.sum())} of {int(wanted[result].sum())} did not change"
        assert not other.any(), f"{where}: {int(other.sum())} changed that must not"


def indices(call: Call, name: str) -> list[tuple[int, ...]]:
    """Elements to change: every token of ``AT`` of arguments over time, and some of the others."""
    shape, random = call.tensors[name].shape, torch.Generator().manual_seed(len(name))

    def one(at: int | None) -> tuple[int, ...]:
        index = [int(torch.randint(n, (1,), generator=random)) for n in shape]
        return tuple(index[:1] + [at] + index[2:] if at is not None else index)

    return [one(at) for at in AT] if name in call.timed else [one(None) for _ in range(3)]


@pytest.mark.parametrize(("kind", "rank", "lengths", "form"), halved(KINDS, RANKS, [None, LENGTHS], FORMS))
def test_mutants(kind, rank, lengths, form):
    call, out = base(kind, rank, lengths, form)
    names = call.tensors if rank == "BTHK" else [n for n in call.tensors if n in ("decay", "k", "S")]
    for name in names:
        for index in indices(call, name):
            check(call, out, reach(kind, rank, lengths, name, index), (name, index, form))


@pytest.mark.parametrize("form", FORMS)
def test_mutants_of_what_is_not_divided(form):
    """The denominator sees q, k, decay and z, and neither v nor S."""
    call = make("normalize", "BTHK", T=70).set(normalize="return")
    out = call(form)
    for name in ("v", "S"):
        mutant = call.with_(**{name: call.tensors[name] + 1})(form)
        same_bits({n: mutant[n] for n in ("denominator", "z")}, {n: out[n] for n in ("denominator", "z")})
    mutant = call.with_(z=call.tensors["z"] + 1)(form)
    same_bits({n: mutant[n] for n in ("o", "S")}, {n: out[n] for n in ("o", "S")})
    assert (mutant["denominator"] != out["denominator"]).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_what_an_output_sees_and_nothing_else(kind, form):
    """The transposed check: the gradient of one output element."""
    call = make(kind, "BTHK", T=70, H=4, Hk=2, K=3, V=3, strength=(0.01, 0.1))
    b, t, h, d = 1, 65, 3, 2
    leaves = {n: x.clone().requires_grad_() for n, x in call.tensors.items()}
    out = call.with_(**leaves)(form)
    grads = torch.autograd.grad(out["o"][b, t, h, d] * cotangent(out["o"])[b, t, h, d], list(leaves.values()))
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        seen = torch.zeros_like(leaf, dtype=torch.bool)
        head = h // GROUP if name in ("q", "k") else h
        last = t if name == "decay" and "bonus" in call.tensors else t + 1
        regions = {"q": (b, t, head), "bonus": (h,), "S": (b, h, slice(None), d), "z": (b, h), "v": (b, slice(0, t + 1), h, d)}
        seen[regions.get(name, (b, slice(0, last), head))] = True
        assert (grad[seen] != 0).all(), f"{name}: {int((grad[seen] == 0).sum())} of {int(seen.sum())} without a gradient"
        assert not grad[~seen].any(), f"{name}: {int((grad[~seen] != 0).sum())} with a gradient that must have none"
