"""Half precision beside float32 on this CPU, in turns: ``python -m benchmarks.halves``.

One row for each native kernel and pass, with the processor time of bfloat16 (and float16) over that of float32: the median of the
ratios of neighbouring runs in one thread. A ratio above 1 is a kernel that is slower for half the bytes. Processor time is least
affected by other load.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import linattn
from benchmarks import RESULTS, positive
from linattn.ops.linears import linears
from linattn.ops.norms import rms_norm
from linattn.ops.short_convolution import short_convolution
from linattn.state import replacing, writable

FAMILIES = ("none", "head", "channel", "beta-head", "beta-channel", "erase", "bonus", "normalize")
DTYPES = (torch.bfloat16, torch.float16)
HEADS, SIZE, WIDTH = 8, 64, 2048
Call = tuple[Callable[..., Any], dict[str, Tensor]]


def attention(family: str, dtype: torch.dtype, tokens: int, rows: int = 1) -> Call:
    """The recurrence of ``family`` with decays and states in float32, as mixers call it; a step where ``tokens`` is 1."""
    torch.manual_seed(0)

    def normal(*last: int) -> Tensor:
        return torch.randn(rows, tokens, HEADS, *last)

    t = {"q": normal(SIZE), "k": F.normalize(normal(SIZE), dim=-1), "v": normal(SIZE)}
    options: dict[str, Any] = {}
    if "head" in family or family == "normalize":
        t["decay"] = F.logsigmoid(normal())
    elif family != "none":
        t["decay"] = F.logsigmoid(normal(SIZE))
    if "beta" in family:
        t["beta"] = normal().sigmoid()
    if family == "erase":
        t |= {"read": t["k"], "write": -0.5 * t["k"]}
    if family == "bonus":
        t["bonus"] = torch.randn(HEADS, SIZE)
    if family == "normalize":
        t, options = t | {"q": t["q"].abs(), "k": t["k"].abs()}, {"normalize": True}
    t = {name: x if name == "decay" else x.to(dtype) for name, x in t.items()}
    if tokens == 1:
        state = torch.randn(rows, HEADS, SIZE, SIZE)
        options["initial_state"] = (state, torch.rand(rows, HEADS, SIZE)) if family == "normalize" else state
    return partial(_attention, options), t


def _attention(options: dict[str, Any], read: Tensor | None = None, write: Tensor | None = None, **t: Tensor) -> Tensor:
    erase = None if read is None or write is None else (read, write)
    return linattn.linear_attention(**t, erase=erase, backend="cpu", return_state=True, **options)[0]


def others(dtype: torch.dtype, tokens: int) -> dict[str, Call]:
    """Scans, the short convolution and the norm on ``tokens`` tokens."""
    torch.manual_seed(0)
    width = HEADS * SIZE
    x, decay = torch.randn(1, tokens, width).to(dtype), F.logsigmoid(torch.randn(1, tokens, width))
    b, c = (torch.randn(1, tokens, 16).to(dtype) for _ in range(2))
    dt, a = F.softplus(torch.randn(1, tokens, width) - 3).to(dtype), -torch.rand(width, 16) - 0.1
    return {
        "diagonal_scan": (partial(linattn.diagonal_scan, backend="cpu"), {"decay": decay, "b": x}),
        "selective_scan": (partial(linattn.selective_scan, A=a, backend="cpu"), {"x": x, "dt": dt, "B": b, "C": c}),
        "short_convolution": (_convolution, {"x": x, "weight": torch.randn(width, 1, 4).to(dtype)}),
        "rms_norm": (partial(rms_norm, eps=1e-6, backend="cpu"), {"x": x, "weight": torch.ones(width).to(dtype)}),
    }


def _convolution(x: Tensor, weight: Tensor) -> Tensor:
    return short_convolution(x, weight, backend="cpu")


def maps(dtype: torch.dtype, rows: int) -> Call:
    """Four linear maps of ``rows`` vectors, as a decoding step has them; their 67 MB of float32 fit no cache."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH).to(dtype) for _ in range(4)]
    return partial(_linears, weights), {"x": torch.randn(rows, WIDTH).to(dtype)}


def _linears(weights: list[Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return linears(x, weights, [None] * len(weights))[0]


def cases(tokens: int, steps: int) -> Iterator[tuple[str, str, Callable[[torch.dtype], Call]]]:
    """Name, pass and maker of every row."""
    for family in FAMILIES:
        for mode in ("forward", "forward+backward"):
            yield family, mode, partial(attention, family, tokens=tokens)
        yield family, "step", partial(attention, family, tokens=1, rows=steps)
    for name in others(torch.float32, 1):
        for mode in ("forward", "forward+backward"):
            yield name, mode, partial(_other, name, tokens)
    for rows in (1, 4, 8):
        yield f"linears of {rows}", "step", partial(maps, rows=rows)


def _other(name: str, tokens: int, dtype: torch.dtype) -> Call:
    return others(dtype, tokens)[name]


def pass_of(mode: str, call: Call) -> Callable[[], object]:
    """One run of the call, with the gradients of all its tensors if the mode has them."""
    function, tensors = call
    if mode != "forward+backward":
        return partial(torch.no_grad()(function), **tensors)
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    y = function(**leaves).detach()
    weight = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)

    def both() -> object:
        return torch.autograd.grad(function(**leaves), list(leaves.values()), weight)

    return both


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Processor seconds of ``repeats`` runs."""
    begun = time.process_time()
    for _ in range(repeats):
        run()
    return time.process_time() - begun


def ratios(mode: str, make: Callable[[torch.dtype], Call], rounds: int, least: float) -> dict[str, float]:
    """Milliseconds in float32, and the median ratio of each half-precision dtype; every run lasts about ``least`` seconds."""
    runs = {dtype: pass_of(mode, make(dtype)) for dtype in (torch.float32, *DTYPES)}
    for run in runs.values():
        run()
    repeats = max(1, round(least / max(seconds(runs[torch.float32], 1), 1e-6)))
    times = [{dtype: seconds(run, repeats) for dtype, run in runs.items()} for _ in range(rounds)]
    row = {"float32_ms": round(1e3 * statistics.median(t[torch.float32] for t in times) / repeats, 4)}
    return row | {str(d).removeprefix("torch."): round(statistics.median(t[d] / t[torch.float32] for t in times), 3) for d in DTYPES}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.halves", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=positive, default=2048, help="of one sequence with 8 heads of 64")
    parser.add_argument("--rows", type=positive, default=16, help="sequences of a step of the recurrence")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--only", default="", help="rows whose name or pass contains this")
    parser.add_argument("--out", type=Path, default=RESULTS / "halves-cpu.json")
    asked = parser.parse_args(arguments)
    from linattn.bench.files import command
    from linattn.ops.cpu import library
    from linattn.report.machine import machine

    out = writable(asked.out)
    torch.set_num_threads(1)
    rows = []
    for name, mode, make in cases(asked.tokens, asked.rows):
        if asked.only in f"{name} {mode}":
            rows.append({"kernel": name, "mode": mode, **ratios(mode, make, asked.rounds, 0.05)})
            print(
                f"{name:18} {mode:17} {rows[-1]['float32_ms']:9.3f} ms",
                *(f"{d} {rows[-1][d]:.2f} x" for d in ("bfloat16", "float16")),
                flush=True,
            )
    told = command(parser.prog, sys.argv[1:] if arguments is None else arguments)
    facts = {"command": told, "date": datetime.now(UTC).date().isoformat(), "machine": machine(), "native_isa": library.isa()}
    with replacing(out) as aside:
        aside.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(row['bfloat16'] > 1 for row in rows)} of {len(rows)} rows are slower in bfloat16: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
