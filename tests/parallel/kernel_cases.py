"""The recurrence's GPU kernels under context parallelism: on GPUs, or tiny in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh

from linattn.parallel import Layout
from tests.parallel import op_cases
from tests.parallel.compare import Given, counted, differences, fault

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LIMITS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (6e-3, 2.5e-2)}  # of outputs and states, of gradients
LOW = ("q", "k", "v", "read", "write")  # in half precision

if INTERPRETED:
    from tests.ops.triton import interpreter  # noqa: F401  before any kernel runs


def cases(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], str | None]]]:
    heads, size = (2, 16) if INTERPRETED else (4, 128)
    tokens = 40 if INTERPRETED else 3000
    ranks = mesh.size()
    cuts = {"even": {}, "one token": {"sizes": [tokens - ranks + 1, *[1] * (ranks - 1)]}}
    cuts["packed"] = {"cu_seqlens": [0, tokens // 4, tokens // 4, 3 * tokens // 4, tokens]}
    for dtype in (torch.float32,) if INTERPRETED else LIMITS:
        for cut, how in cuts.items():
            layout = Layout.of(mesh, tokens, **how)
            for rule, given in rules(tokens, heads, size).items():
                if INTERPRETED and cut != "even" and rule not in ("per channel", "delta per channel"):
                    continue
                name = f"kernels, {rule}, {cut}, {str(dtype).removeprefix('torch.')}"
                yield name, partial(compared, layout, given, dtype)


def rules(tokens: int, heads: int, size: int) -> dict[str, Given]:
    """Inputs of the rules, from an initial state."""
    head, channel = (1, tokens, heads), (1, tokens, heads, size)
    numbers = op_cases.numbers
    unit = torch.nn.functional.normalize(numbers(*channel, seed=2), dim=-1)
    fades = {"per head": -numbers(*head, seed=4).exp() / 16, "per channel": -numbers(*channel, seed=4).exp() / 16}
    delta = {"k": unit, "beta": numbers(*head, seed=6).sigmoid()}
    found: dict[str, Given] = {
        "plain": {},
        "constant per head": {"constant": -numbers(heads, seed=4).exp() / 16},
        **{name: {"decay": fade} for name, fade in fades.items()},
        "delta": delta,
        "gated delta": {**delta, "decay": fades["per head"]},
        "delta per channel": {**delta, "decay": fades["per channel"]},
        "erase": {"read": unit, "write": -unit * numbers(*head, 1, seed=9).sigmoid(), "decay": fades["per channel"]},
        "bonus": {"bonus": numbers(heads, size, seed=7), "decay": fades["per channel"]},
    }
    same = {"q": numbers(*channel, seed=1), "k": numbers(*channel, seed=2) / size**0.5, "v": numbers(*channel, seed=3)}
    same["initial"] = numbers(1, heads, size, size, seed=10)
    return {name: {**same, **given} for name, given in found.items()}


def compared(layout: Layout, given: Given, dtype: torch.dtype) -> str | None:
    """Compare with one process in float64. The kernels exchange by one all-gather each way; outputs are gathered for comparison."""
    given = {name: t.to(dtype if name in LOW else torch.float32) for name, t in given.items()}
    call = op_cases.attention
    if layout.cu_seqlens is not None:  # without states
        call = op_cases.stateless
        del given["initial"]
    with counted() as counts:
        found = differences(call, layout, given, {"backend": "triton"}, {"backend": "torch"})
    if counts != {"_all_gather": 3, "_reduce_scatter": 0}:
        return f"the collectives are {counts}"
    return fault(found, *LIMITS[dtype])
