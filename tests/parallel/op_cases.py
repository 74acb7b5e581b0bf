"""The operations under context parallelism: rules, and layouts of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import linattn
from linattn.ops.outer_decay import outer_decay
from linattn.ops.short_convolution import short_convolution
from linattn.parallel import Layout, fold
from tests.parallel import compare
from tests.parallel.compare import Call, Given, differences, fault

TOKENS, HEADS, K, V = 13, 2, 3, 4


def cuts(ranks: int) -> dict[str, Given]:
    """Layouts of a sequence of TOKENS."""
    rest = TOKENS - ranks + 1
    packed = [0, 3, 3, 7, 8, TOKENS]
    return {
        "even": {},
        "uneven": {"sizes": [rest - 1, *[1] * (ranks - 2), 2]},
        "one token": {"sizes": [*[1] * (ranks - 1), rest]},
        "empty first": {"sizes": [0, TOKENS, *[0] * (ranks - 2)]},
        "empty last": {"sizes": [TOKENS, *[0] * (ranks - 1)]},
        "packed": {"cu_seqlens": packed},
        "packed at the cut": {"cu_seqlens": [0, rest, TOKENS], "sizes": [rest, *[1] * (ranks - 1)]},
        "zigzag": {"order": "zigzag"},
        "zigzag uneven": {"order": "zigzag", "sizes": [rest - 1, *[1] * (ranks - 2), 2]},
        "zigzag packed": {"order": "zigzag", "cu_seqlens": packed},
    }


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(compare.DEVICE, dtype)


def rules(batch: int, tokens: int = TOKENS) -> dict[str, Given]:
    """Inputs of the rules of linear attention."""

    def fading(*shape: int) -> Tensor:
        return -numbers(*shape, seed=4).exp()

    head, channel = (batch, tokens, HEADS), (batch, tokens, HEADS, K)
    unit = torch.nn.functional.normalize(numbers(*channel, seed=2), dim=-1)
    read = 0.5 * numbers(*channel, seed=5)
    return {
        "plain": {},
        "constant per head": {"constant": fading(HEADS)},
        "constant per channel": {"constant": fading(HEADS, K)},
        "per head": {"decay": fading(*head)},
        "per channel": {"decay": fading(*channel)},
        "delta": {"k": unit, "beta": numbers(*head, seed=6).sigmoid()},
        "gated delta": {"k": unit, "beta": numbers(*head, seed=6).sigmoid(), "decay": fading(*head)},
        "delta per channel": {"k": unit, "beta": numbers(*head, seed=6).sigmoid(), "decay": fading(*channel)},
        "erase": {"read": read, "write": 0.5 * numbers(*channel, seed=9), "decay": fading(*channel)},
        "bonus": {"bonus": numbers(HEADS, K, seed=7), "decay": fading(*channel)},
        "normalize": {"normalize": 0.1, "decay": fading(*head)},
        "normalize plain": {"normalize": "return"},
    }  # fmt: skip


def arguments(t: Given) -> Given:
    """The arguments of linattn.linear_attention, except states, from the inputs of the cases."""
    t = dict(t)
    if "constant" in t:
        t["decay"] = t.pop("constant")
    if "read" in t:
        t["erase"] = t.pop("read"), t.pop("write")
    return t


def stateless(t: Given) -> tuple[Tensor, ...]:
    """Only the output of :func:`attention`, without states."""
    return (linattn.linear_attention(**arguments(t)),)


def attention(t: Given) -> tuple[Tensor, ...]:
    """linattn.linear_attention with the inputs' names of the cases."""
    t = arguments(t)
    initial, z = t.pop("initial", None), t.pop("initial_z", None)
    o, state = linattn.linear_attention(**t, initial_state=initial if z is None else (initial, z), return_state=True)
    o = o if isinstance(o, Tensor) else torch.cat([o[0], o[1][..., None]], -1)
    return (o, *(state if isinstance(state, tuple) else (state,)))


def attention_cases(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], str | None]]]:
    for cut, how in cuts(mesh.size()).items():
        layout = Layout.of(mesh, TOKENS, **how)
        batch = 1 if layout.cu_seqlens else 2
        for rule, inputs in rules(batch).items():
            given = {"q": numbers(batch, TOKENS, HEADS, K, seed=1), "k": numbers(batch, TOKENS, HEADS, K, seed=2).abs()}
            given |= {"v": numbers(batch, TOKENS, HEADS, V, seed=3), **inputs}
            options = {n: given.pop(n) for n in ("normalize",) if n in given}
            rows = layout.sequences * batch
            started = {**given, "initial": numbers(rows, HEADS, K, V, seed=10)}
            if options:
                started["initial_z"] = numbers(rows, HEADS, K, seed=11).abs()
            yield f"{rule}, {cut}, from a state", partial(_compared, attention, layout, started, options)
            yield f"{rule}, {cut}", partial(_compared, attention if options else stateless, layout, given, options)


def _compared(call: Call, layout: Layout, given: Given, options: Given) -> str | None:
    return fault(differences(call, layout, given, options))


def scan(op: Callable[..., Any], names: tuple[str, ...], t: Given) -> tuple[Tensor, ...]:
    """An operation with one state, its tensors in the order of ``names``."""
    more = {"cu_seqlens": t["cu_seqlens"]} if "cu_seqlens" in t else {}
    y, last = op(
        *(t[n] for n in names), initial_state=t.get("initial"), return_state=True, **{n: t[n] for n in ("bias", "z") if n in t}, **more
    )
    return y, last


def convolution(t: Given) -> tuple[Tensor, ...]:
    """The short convolution; of packed sequences one process calls it for each."""
    cu = t.get("cu_seqlens")
    x, more = t["x"], {"bias": t["bias"]}
    before = t.get("initial")
    if cu is None:
        return (short_convolution(x, t["weight"], before=before, **more),)
    befores = [None] * (len(cu) - 1) if before is None else before[:, None]
    return (
        torch.cat(
            [short_convolution(x[:, a:b], t["weight"], before=p, **more) for a, b, p in zip(cu[:-1], cu[1:], befores, strict=True)], 1
        ),
    )


def other_cases(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], str | None]]]:
    width = 5
    for cut, how in cuts(mesh.size()).items():
        layout = Layout.of(mesh, TOKENS, **how)
        batch = 1 if layout.cu_seqlens else 2
        rows, time = layout.sequences * batch, (batch, TOKENS, width)
        fade, x = -numbers(*time, seed=1).exp(), numbers(*time, seed=2)
        turning = torch.complex(fade, numbers(*time, seed=3))
        cases: dict[str, tuple[Call, Given]] = {
            "sum": (partial(scan, linattn.diagonal_scan, ("decay", "x")), {"decay": fade, "x": x, "initial": numbers(rows, width, seed=4)}),
            "constant sum": (
                partial(scan, linattn.diagonal_scan, ("constant", "x")),
                {"constant": fade[0, 0], "x": x, "initial": numbers(rows, width, seed=4)},
            ),
            "complex sum": (
                partial(scan, linattn.diagonal_scan, ("decay", "x")),
                {"decay": turning, "x": x, "initial": numbers(rows, width, seed=4, dtype=torch.complex128)},
            ),
            "maximum": (
                partial(scan, linattn.running_max, ("decay", "x")),
                {"decay": fade, "x": x, "initial": numbers(rows, width, seed=4)},
            ),
            "selective": (
                partial(scan, linattn.selective_scan, ("x", "dt", "A", "B", "C", "D")),
                {
                    "x": x, "dt": -fade, "A": -numbers(width, K, seed=5).exp(), "B": numbers(batch, TOKENS, K, seed=6),
                    "C": numbers(batch, TOKENS, K, seed=7), "D": numbers(width, seed=8), "initial": numbers(rows, width, K, seed=9),
                },
            ),
            "selective, gated": (
                partial(scan, partial(linattn.selective_scan, softplus=True), ("x", "dt", "A", "B", "C")),
                {
                    "x": x, "dt": fade, "A": -numbers(width, K, seed=5).exp(), "B": numbers(batch, TOKENS, K, seed=6),
                    "C": numbers(batch, TOKENS, K, seed=7), "z": numbers(*time, seed=8), "bias": numbers(width, seed=9),
                },
            ),
            "outer decay": (
                partial(scan, outer_decay, ("q", "k", "v", "f", "g")),
                {
                    "q": numbers(batch, TOKENS, HEADS, K, seed=1), "k": numbers(batch, TOKENS, HEADS, K, seed=2),
                    "v": numbers(batch, TOKENS, HEADS, V, seed=3), "f": -numbers(batch, TOKENS, HEADS, K, seed=4).exp(),
                    "g": -numbers(batch, TOKENS, HEADS, V, seed=5).exp(), "initial": numbers(rows, HEADS, K, V, seed=6),
                },
            ),
            "lti": (
                lambda t: linattn.lti(t["x"], t["A"], t["B0"], t["C0"], t["initial"], return_state=True, cu_seqlens=t.get("cu_seqlens")),
                {
                    "x": x, "A": -numbers(width, K, seed=5).exp(), "B0": numbers(width, K, seed=6), "C0": numbers(width, K, seed=7),
                    "initial": numbers(rows, width, K, seed=8),
                },
            ),
            "dense lti": (
                lambda t: linattn.lti(t["x"], t["A"], t["B0"], t["C0"], t["initial"], return_state=True, cu_seqlens=t.get("cu_seqlens")),
                {
                    "x": x, "A": 0.3 * numbers(width, K, K, seed=5), "B0": numbers(width, K, seed=6), "C0": numbers(width, K, seed=7),
                    "initial": numbers(rows, width, K, seed=8),
                },
            ),
            "convolution": (
                convolution,
                {
                    "x": x, "weight": numbers(width, 1, 4, seed=5), "bias": numbers(width, seed=6),
                    "initial": numbers(rows, 3, width, seed=7),
                },
            ),
        }  # fmt: skip
        for name, (call, given) in cases.items():
            yield f"{name}, {cut}, from a state", partial(_compared, call, layout, given, {})
            yield f"{name}, {cut}", partial(_compared, _fresh(call), layout, {n: t for n, t in given.items() if n != "initial"}, {})


def _fresh(call: Call) -> Call:
    return lambda t: call({"initial": None, **t})


def stepwise_cases(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """The cases with one part of whole rows per process again, with states exchanged by a scan."""
    for name, case in (*attention_cases(mesh), *other_cases(mesh)):
        if any(f", {cut}" in name for cut in ("uneven", "one token", "empty first", "empty last")) and "zigzag" not in name:
            yield f"step by step: {name}", partial(_stepwise, case)


def _stepwise(case: Callable[[], str | None]) -> str | None:
    with mock.patch.object(fold, "SCAN_ABOVE", 1), mock.patch.object(fold, "all_gather", None):
        return case()
