"""``linattn bench ops``: the recurrence on this machine's CPU against the pure PyTorch code in use today.

Both sides of a comparison take turns in one process, so what else the machine does meets both; a row tells the median of the
ratios of neighbouring runs. Before it is timed each peer has to give our numbers.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from linattn.bench import peers as peers_module
from linattn.bench.files import file_for
from linattn.bench.peers import Peer, inputs

LENGTHS = (256, 512, 1024, 4096, 16384)
LONG = (4096, 16384, 65536)
MODES = ("forward", "forward+backward")
ROUNDS, SECONDS = 9, 5.0  # a comparison ends after so many rounds, or with the round in which so long has passed


@dataclass(frozen=True)
class Row:
    """One comparison: milliseconds are medians, ``ratio`` is theirs / ours, the median over rounds."""

    peer: str
    what: str
    mode: str
    dtype: str
    tokens: int
    ours_ms: float
    theirs_ms: float
    ratio: float
    rounds: int
    target: float | None


def run(*, quick: bool = False, out: Path | None = None, only: list[str] | None = None) -> None:
    """Measure, print a table, and write the figures to ``out`` (JSON) if given."""
    from rich.console import Console
    from rich.progress import Progress

    known = peers_module.all_peers()
    if unknown := [name for name in only or [] if name not in known]:
        raise ValueError(f"--peers must be among {', '.join(known)}, but has {', '.join(unknown)}")
    cells = list(_cells([known[name] for name in only or known], quick))
    lengths = LONG[:1] if quick else LONG
    rows, growth = [], []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cells) + len(lengths))
        for cell in cells:
            progress.update(task, description=f"{cell[0].name} {cell[1]} {cell[3]} tokens")
            rows.append(compare(*cell, rounds=2 if quick else ROUNDS))
            progress.console.print(_line(rows[-1]), highlight=False)
            progress.advance(task)
        for tokens in lengths:
            progress.update(task, description=f"growth: {tokens} tokens")
            growth.append(_growth(tokens, 1 if quick else 3))
            progress.advance(task)
    _print(rows, growth)
    if out is not None:
        _write(file_for(out, "ops", "cpu"), rows, growth)


def _cells(chosen: list[Peer], quick: bool) -> Iterator[tuple[Peer, str, torch.dtype, int]]:
    for peer in chosen:
        for mode in MODES:
            for tokens in LENGTHS[:1] if quick else LENGTHS:
                for dtype in peer.dtypes[:1] if quick else peer.dtypes:
                    if tokens <= peer.longest[mode]:
                        yield peer, mode, dtype, tokens


def compare(peer: Peer, mode: str, dtype: torch.dtype, tokens: int, rounds: int = ROUNDS) -> Row:
    """One row: both run in turns. Raises ValueError if the two do not compute the same."""
    theirs, x = peer.load(), inputs(tokens, dtype, gradients=mode != "forward")
    if not peer.name.startswith(("softmax", "per-head")):  # these compute something else, on purpose
        _same(peer, theirs, dtype)
    gradient = torch.randn(1, tokens, 8, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    timed = [_timer(run, x, mode, gradient) for run in (peer.ours, theirs)]
    timed[0]()  # ours is not cold either when theirs is measured
    pairs: list[tuple[float, float]] = []
    started = time.perf_counter()
    while len(pairs) < rounds + 1 and (not pairs or time.perf_counter() - started < SECONDS):
        pairs.append((timed[0](), timed[1]()))
    pairs = pairs[1:] or pairs  # the first round is warm-up, unless there was time for no other
    ours, other = zip(*pairs, strict=True)
    ratio = statistics.median(b / a for a, b in pairs)
    name = str(dtype).removeprefix("torch.")
    target = peer.targets.get((mode, tokens)) if dtype == torch.float32 else None
    return Row(peer.name, peer.what, mode, name, tokens, _ms(ours), _ms(other), ratio, len(pairs), target)


def _ms(seconds) -> float:
    return statistics.median(seconds) * 1e3


def _timer(run: Callable, x: dict[str, torch.Tensor], mode: str, gradient: torch.Tensor) -> Callable[[], float]:
    wanted = list(x.values())

    def once() -> float:
        start = time.perf_counter()
        if mode == "forward":
            with torch.no_grad():
                run(x)
        else:
            torch.autograd.grad(run(x), wanted, gradient, allow_unused=True)
        return time.perf_counter() - start

    return once


def _same(peer: Peer, theirs: Callable, dtype: torch.dtype) -> None:
    x = inputs(200, dtype, gradients=False)
    a, b = peer.ours(x).double(), theirs(x).double()
    error = ((a - b).norm() / b.norm()).item()
    if not error < (1e-4 if dtype == torch.float32 else 2e-2):
        raise ValueError(f"{peer.what} does not compute what linattn computes: relative difference {error:.1e} in {dtype}")


def _growth(tokens: int, rounds: int) -> dict[str, float]:
    """Time a token of ours with a decay per head and the delta rule, float32: flat where the work is linear."""
    row: dict[str, float] = {"tokens": tokens}
    for name, run in (("head", peers_module.head), ("gated_delta", peers_module.gated_delta)):
        for mode in MODES:
            timer = _timer(run, inputs(tokens, torch.float32, gradients=mode != "forward"), mode, torch.randn(1, tokens, 8, 64))
            timer()
            row[f"{name} {mode}"] = statistics.median(timer() for _ in range(rounds)) / tokens * 1e6
    return row


def _line(r: Row) -> str:
    return f"{r.peer} {r.mode} {r.dtype} {r.tokens}: ours {r.ours_ms:.1f} ms, theirs {r.theirs_ms:.1f} ms, ratio {r.ratio:.2f}"


def _print(rows: list[Row], growth: list[dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("peer", "mode", "dtype", "tokens", "ours ms", "theirs ms", "ratio", "wanted", title="median of ratios, theirs / ours")
    for r in rows:
        wanted = "" if r.target is None else f"{'ok' if r.ratio >= r.target else 'MISSED'} (>= {r.target:.2g})"
        figures = (f"{r.ours_ms:.1f}", f"{r.theirs_ms:.1f}", f"{r.ratio:.2f}")
        table.add_row(r.peer, r.mode, r.dtype, str(r.tokens), *figures, wanted)
    linear = Table(*growth[0], title="microseconds a token, float32")
    for g in growth:
        linear.add_row(str(g["tokens"]), *(f"{v:.2f}" for k, v in g.items() if k != "tokens"))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(linear)


def _write(out: Path, rows: list[Row], growth: list[dict[str, float]]) -> None:
    from linattn.report.folder import write_text
    from linattn.report.machine import machine

    body = {
        "command": " ".join(["linattn", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "rows": [asdict(r) for r in rows],
        "growth_us_per_token": growth,
    }
    write_text(out, json.dumps(body, indent=1) + "\n")
