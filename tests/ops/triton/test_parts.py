"""Rows shared by several processes: their kernels run in turn in this process, with simulated exchange."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from torch import Tensor

import linattn
from linattn.ops.linear_attention import part_of_rows
from linattn.ops.triton import fitting, launch, parts
from linattn.ops.triton import linear_attention as kernels
from linattn.ops.triton.hopper import choice
from linattn.ops.triton.run import Run
from tests.ops.triton.device import INTERPRETED, LATER, first

BATCH, HEADS, K, V = 2, 2, 16, 20
# The interpreter runs one of these rows: a program's row and head do not depend on the rule.
EACH = ("constant", "gated delta", "bonus")  # a decay of each kind
OF_ONE_ROW = ("plain", "head", "channel", "delta", "erase", "bonus", "normalize") if INTERPRETED else ()
WHOLE = ("constant", "bonus", "initial_state", "initial_z")  # replicated arguments
LIMITS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (6e-3, 2.5e-2)}  # of outputs and states, of gradients


@dataclass
class Mail:
    """Exchange among ``ranks`` that run in turn: sent values do not depend on received ones, so a second round has all."""

    ranks: int
    rank: int = 0
    joined: bool = False
    passes: bool = False
    sent: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    calls: int = 0

    def gather(self, t: Tensor) -> Callable[[], Tensor]:
        self.sent[self.rank, self.calls] = t.clone()
        found = torch.stack([self.sent.get((rank, self.calls), torch.full_like(t, torch.nan)) for rank in range(self.ranks)])
        self.calls += 1
        return lambda: found

    def turn(self, rank: int, joined: bool, passes: bool) -> Mail:
        self.rank, self.joined, self.passes, self.calls = rank, joined, passes, 0
        return self


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rules(tokens: int) -> dict[str, dict[str, Tensor]]:
    head, channel = (BATCH, tokens, HEADS), (BATCH, tokens, HEADS, K)
    decays = {"head": -numbers(*head, seed=4).exp() / 64, "channel": -numbers(*channel, seed=4).exp() / 64}
    unit = torch.nn.functional.normalize(numbers(*channel, seed=2), dim=-1)
    delta = {"k": unit, "beta": numbers(*head, seed=6).sigmoid()}
    erase = {"read": unit, "write": -unit * numbers(*head, 1, seed=9).sigmoid()}
    return {
        "plain": {},
        "constant": {"constant": -numbers(HEADS, seed=4).exp() / 64},
        "head": {"decay": decays["head"]},
        "channel": {"decay": decays["channel"]},
        "delta": delta,
        "gated delta": delta | {"decay": decays["head"]},
        "kda": delta | {"decay": decays["channel"]},
        "erase": erase | {"decay": decays["channel"]},
        "bonus": {"bonus": numbers(HEADS, K, seed=7), "decay": decays["channel"]},
        "normalize": {"decay": decays["head"], "initial_z": numbers(BATCH, HEADS, K, seed=11).abs()},
    }


def called(op: Callable, t: dict[str, Tensor], **options) -> tuple[Tensor, ...]:
    """Output and final states."""
    t = dict(t)
    if "constant" in t:
        t["decay"] = t.pop("constant")
    if "read" in t:
        t["erase"] = t.pop("read"), t.pop("write")
    if "initial_z" in t:
        t["initial_state"] = t["initial_state"], t.pop("initial_z")
        options["normalize"] = "return"
    if "cu_seqlens" in options:
        return (op(**t, **options),)
    o, s = op(**t, return_state=True, **options)
    if isinstance(o, tuple):
        return torch.cat([o[0], o[1][..., None]], -1), *s
    return o, s


def losses(outputs: tuple[Tensor, ...], part: slice, tokens: int, share: float) -> Tensor:
    o, *states = outputs
    total = (o * numbers(len(o), tokens, *o.shape[2:], seed=20)[:, part].to(o)).sum()
    return total + sum(share * (s * numbers(*s.shape, seed=21 + i).to(s)).sum() for i, s in enumerate(states))


def leaves(given: dict[str, Tensor], part: slice, device: str, dtype: torch.dtype, *others: str) -> dict[str, Tensor]:
    """Part of the tensors as leaves; queries, keys, values and ``others`` in ``dtype``, the rest in float32 at least."""
    cut = {name: (t if name in WHOLE else t[:, part]).detach().clone().to(device) for name, t in given.items()}
    low = ("q", "k", "v", "read", "write", *others)
    return {name: t.to(dtype if name in low else torch.promote_types(dtype, torch.float32)).requires_grad_() for name, t in cut.items()}


@pytest.mark.parametrize("sizes", [pytest.param((64, 64), marks=LATER), (33, 20, 1, 12)], ids=str)
@pytest.mark.parametrize("rule", [rule if rule in EACH else pytest.param(rule, marks=LATER) for rule in rules(1)])
def test_parts_equal_the_whole(rule: str, sizes: tuple[int, ...], device: str) -> None:
    compare(rule, sizes, device)


def test_many_channels_of_keys_take_an_exchange_for_each_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WIDEST", V // 2)
    assert compare("channel", (20, 17), device).calls == 4


# The second sequence spans two parts; sequences start with parts; the third starts inside of one, without a carried state.
BORDERS = ((0, 10, 60, 66), (0, 5, 33, 53, 54, 66), (0, 33, 50, 66))
QUICK = [("kda", BORDERS[1])]


@pytest.mark.parametrize(("rule", "borders"), first(QUICK, product(["head", "channel", "kda", "erase"], BORDERS)), ids=str)
def test_parts_of_packed_sequences(rule: str, borders: tuple[int, ...], device: str) -> None:
    compare(rule, (33, 20, 1, 12), device, borders)


def test_a_kernel_that_does_not_fit_is_not_tried_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def unfit(*_: object, **__: object) -> None:
        tried.append("once")
        raise fitting.Unfit("too large")

    monkeypatch.setattr(parts.launch, "run", unfit)
    monkeypatch.setattr(fitting, "_unfit", {})
    q = numbers(1, 32, 1, 16, seed=1).to(device)
    for _ in range(2):
        assert part_of_rows(Mail(2), q=q, k=q, v=q, backend="triton") is None
    assert tried == ["once"]


@pytest.mark.skipif(INTERPRETED, reason="kernels of Hopper's own")
@pytest.mark.parametrize("rule", ["delta", "gated delta", "channel"])
def test_chunks_prepared_once_and_lent_memory_change_no_bits(rule: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, reused, prepare = [], [], Run.prepare

    def prepared(run: Run, spare: Tensor | None = None, kept: tuple[Tensor | None, ...] = (None,) * 6, ddecay: bool | None = None) -> None:
        reused.append(kept[0])
        prepare(run, spare, kept, ddecay)

    for name in "KV":
        monkeypatch.setattr(sys.modules[__name__], name, 128)
    monkeypatch.setattr(choice, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(Run, "prepare", prepared)
    given = {name: numbers(BATCH, 192, HEADS, 128, seed=seed) / 4 for seed, name in enumerate("qkv", 1)} | rules(192)[rule]
    narrow = ["decay"] if rule == "channel" else []
    for reason, lent in [(None, True), ("this test asks for both", True), (None, False)]:
        monkeypatch.setattr(Run, "unkept", lambda run, reason=reason: reason)
        monkeypatch.setattr(Run, "in_place", lent)  # the memory of gradients
        launch._programs.clear()
        reused.clear()
        mail = Mail(2)
        try:
            for rank, part in [(0, slice(0, 64)), (1, slice(64, 192))] * 2:
                own = leaves(given, part, device, torch.bfloat16, *narrow)
                got = called(part_of_rows, own, group=mail.turn(rank, rank > 0, rank > 0), backend="triton")
                losses(got, part, 192, 1.0).backward()
                found.append([*got, *(t.grad for t in own.values())])
        finally:
            launch._programs.clear()
        assert any(t is not None for t in reused) == (reason is None)
    for ways in zip(found[:4], found[4:8], found[8:], strict=True):
        for one, *others in zip(*ways, strict=True):
            assert all(torch.equal(one.nan_to_num(1e30), other.nan_to_num(1e30)) for other in others)


def compare(rule: str, sizes: tuple[int, ...], device: str, borders: tuple[int, ...] = ()) -> Mail:
    """Compare each part's results and gradients with the whole's in float64; ``borders`` are those of packed sequences, without states."""
    tokens, dtype = sum(sizes), torch.float32
    given = {"q": numbers(BATCH, tokens, HEADS, K, seed=1), "k": numbers(BATCH, tokens, HEADS, K, seed=2).abs() / 4}
    given |= {"v": numbers(BATCH, tokens, HEADS, V, seed=3), **rules(tokens)[rule]}
    if not borders:
        given["initial_state"] = numbers(BATCH, HEADS, K, V, seed=10)
    if borders or rule in OF_ONE_ROW:
        given = {name: t if name in ("constant", "bonus") else t[:1] for name, t in given.items()}
    whole = leaves(given, slice(None), device, torch.float64)
    wanted = called(linattn.linear_attention, whole, backend="torch", **packed(borders, 0, tokens, device))
    losses(wanted, slice(None), tokens, 1.0).backward()
    mail, starts = Mail(len(sizes)), [sum(sizes[:i]) for i in range(len(sizes))]
    for _ in range(2):
        found = []
        for rank, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            part = slice(start, start + size)
            own = leaves(given, part, device, dtype)
            inside = [b for b in borders if start < b < start + size]
            joined = start not in borders if borders else rank > 0
            turn = mail.turn(rank, joined, joined and not inside)
            got = called(part_of_rows, own, group=turn, backend="triton", **packed(borders, start, start + size, device))
            losses(got, part, tokens, 1 / len(sizes)).backward()
            found.append((part, own, got))
    of_values, of_gradients = LIMITS[dtype]
    for part, _, (o, *states) in found:
        near(o, wanted[0][:, part], of_values, "output")
        for s, t in zip(states, wanted[1:], strict=True):
            near(s, t, of_values, "state")
    for name, t in whole.items():
        gradients = [own[name].grad for _, own, _ in found]
        assert all(g is not None for g in gradients), name
        together = sum(gradients) if name in WHOLE else torch.cat(gradients, 1)
        near(together, t.grad, of_gradients, f"gradient of {name}")
    return mail


def packed(borders: tuple[int, ...], start: int, stop: int, device: str) -> dict[str, Tensor]:
    """The argument ``cu_seqlens`` of the tokens from ``start`` to ``stop``."""
    inside = [start, *(b for b in borders if start < b < stop), stop]
    return {"cu_seqlens": torch.tensor(inside, device=device) - start} if borders else {}


def near(got: Tensor, wanted: Tensor, limit: float, what: str) -> None:
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    error = float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm())
    assert error <= limit, f"{what} is off by {error:.1e}"
