"""Command ``linattn bench vision``: image mixers against the resolution, 8 x 8 to 128 x 128 tokens, with softmax.

A batch holds about as many tokens at every resolution, so that with linear growth the tokens per second are constant. At each
resolution the mixers alternate, so that other load affects all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linattn import mixers
from linattn.bench.files import file_for
from linattn.bench.gpu.record import Record, about
from linattn.bench.gpu.timing import milliseconds

KEY = ("mixer", "side", "mode")
SIDES = (8, 16, 32, 64, 128)  # tokens in a row and in a column
MIXERS = ("softmax", "focused", "agent", "mobile", "efficientvit", "slab")
OPTIONS = {"softmax": {"rotated": 0}}  # no rotary positions, as in a vision transformer
MODES = ("forward", "forward+backward")
# Width of the mixers, tokens of a batch unless one image has more, dtype, and seconds for a figure.
SETTINGS = {"cpu": (64, 1 << 12, torch.float32, 1.0), "cuda": (512, 1 << 17, torch.bfloat16, 0.3)}


def run(*, quick: bool = False, device: str = "cuda", models: tuple[str, ...] = (), out: Path | None = None) -> None:
    """Measure, print a table, and add the rows to ``out`` (JSON, or a folder for it) if given; ``models`` names mixers, none: all."""
    from linattn.report.progress import Progress

    if unknown := [name for name in models if name not in MIXERS]:
        raise ValueError(f"--models must be among {', '.join(MIXERS)}, but has {', '.join(unknown)}")
    facts, rows = about(device), []
    sides = SIDES[:2] if quick else SIDES
    turns = [(name, side, mode) for side in sides for mode in MODES for name in MIXERS if not models or name in models]
    with (
        Record(out and file_for(out, "vision", facts["card"]), KEY, facts) as record,
        Progress(True).counted("measuring", len(turns)) as advance,
    ):
        for name, side, mode in turns:
            rows.append(measure(name, side, mode, device, quick=quick))
            record.add(rows[-1])
            advance(_line(rows[-1]))
    _print(rows, sides)


def measure(name: str, side: int, mode: str, device: str, *, quick: bool = False) -> dict[str, Any]:
    """Measure one row: median milliseconds of a batch, and its tokens per second."""
    dim, tokens, dtype, seconds = SETTINGS[device]
    row: dict[str, Any] = {"mixer": name, "side": side, "mode": mode, "batch": max(1, tokens // side**2), "dim": dim}
    row |= {"dtype": str(dtype).removeprefix("torch."), "ms": None, "tokens_per_second": None}
    torch.manual_seed(0)
    mixer = mixers.create_bidirectional(name, dim=dim, **OPTIONS.get(name, {})).to(device, dtype)
    x = torch.randn(row["batch"], side**2, dim, device=device, dtype=dtype, requires_grad=mode != "forward")
    try:
        row["ms"] = milliseconds([_step(mixer, x, side)], device, 0.0 if quick else seconds)
    except torch.OutOfMemoryError:
        return row | {"failure": "out of memory"}
    return row | {"tokens_per_second": 1e3 * row["batch"] * side**2 / row["ms"]}


def _step(mixer: mixers.Mixer, x: torch.Tensor, side: int) -> Callable[[], object]:
    if not x.requires_grad:
        mixer.eval()
        return torch.no_grad()(lambda: mixers.over_grid(mixer, x, side, side))
    wanted, gradient = [x, *mixer.parameters()], torch.randn_like(x)
    return lambda: torch.autograd.grad(mixers.over_grid(mixer, x, side, side), wanted, gradient)


def _line(row: dict[str, Any]) -> str:
    what = f"{row['mixer']} {row['side']}x{row['side']} {row['mode']}"
    if row["ms"] is None:
        return f"{what}: {row['failure']}"
    return f"{what}: {row['ms']:.2f} ms, {row['tokens_per_second'] / 1e3:,.0f}k tokens/s"


def _print(rows: list[dict[str, Any]], sides: tuple[int, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("mixer", "mode", *(f"{side}x{side}" for side in sides), title="thousand tokens per second")
    for mode in MODES:
        for name in dict.fromkeys(row["mixer"] for row in rows):
            speeds = [row["tokens_per_second"] for row in rows if (row["mixer"], row["mode"]) == (name, mode)]
            table.add_row(name, mode, *("-" if speed is None else f"{speed / 1e3:,.0f}" for speed in speeds))
    Console().print(table)
