"""Command ``linattn bench ops``: the recurrence on this machine's CPU against pure PyTorch code in use today.

Both sides of a comparison alternate in one process, so that other load affects both; a row has the median of the
ratios of neighbouring runs. Before timing, each peer must reproduce our results.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from linattn.bench import peers as peers_module
from linattn.bench.files import command, file_for
from linattn.bench.peers import Inputs, Peer, inputs

LENGTHS = {"forward": (256, 512, 1024, 4096, 16384, 65536), "forward+backward": (256, 1024, 4096, 16384)}
USUAL = 4096  # length also measured with other shapes and one thread
SHAPES = ((8, 64), (4, 128))  # heads, head size
LONG = (4096, 16384, 65536)
ROUNDS, SECONDS = 9, 0.8  # limits of a comparison, checked after each round


@dataclass(frozen=True)
class Cell:
    """Subject of one row."""

    peer: Peer
    mode: str
    dtype: torch.dtype
    tokens: int
    heads: int
    dim: int
    threads: int

    def __str__(self) -> str:
        shape = f"H{self.heads} D{self.dim}, {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.peer.name} {self.mode} {_name(self.dtype)} {self.tokens} tokens, {shape}"

    def inputs(self, tokens: int, gradients: bool) -> Inputs:
        return self.peer.inputs(tokens, self.dtype, gradients=gradients, heads=self.heads, dim=self.dim)


@dataclass(frozen=True)
class Row:
    """Comparison: milliseconds are medians, ``ratio`` is the median over rounds of the peer's time / ours."""

    peer: str
    what: str
    mode: str
    dtype: str
    tokens: int
    heads: int
    dim: int
    threads: int
    ours_ms: float
    theirs_ms: float
    ratio: float
    rounds: int
    target: float | None


def run(*, quick: bool = False, out: Path | None = None, only: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the figures to ``out`` (JSON) if given; ``only`` names peers, None: all, empty: none.

    Unfinished results are in a file beside ``out``, with ``.partial`` in its name.
    """
    from rich.console import Console
    from rich.progress import Progress

    known = peers_module.all_peers()
    if unknown := [name for name in only or () if name not in known]:
        raise ValueError(f"--peers must be among {', '.join(known)} on a CPU, but has {', '.join(unknown)}")
    threads = torch.get_num_threads()
    cells = list(_cells([known[name] for name in (known if only is None else only)], quick, threads))
    lengths = LONG[:1] if quick else LONG
    file = None if out is None else file_for(out, "ops", "cpu")
    partial = None if file is None else file.with_suffix(f".partial{file.suffix}")
    rows: list[Row] = []
    growth: list[dict[str, float]] = []
    compared: set[tuple] = set()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cells) + len(lengths))
        for cell in cells:
            progress.update(task, description=str(cell))
            if (pair := (cell.peer.name, cell.dtype, cell.heads)) not in compared:
                compared.add(pair)
                check(cell)
            rows.append(compare(cell, rounds=2 if quick else ROUNDS))
            progress.console.print(_line(cell, rows[-1]), highlight=False)
            _write(partial, rows, growth)
            progress.advance(task)
        for tokens in lengths:
            progress.update(task, description=f"growth: {tokens} tokens")
            growth.append(_growth(tokens, 1 if quick else 3))
            progress.advance(task)
    _print(rows, growth)
    _write(partial, rows, growth)
    if partial is not None and file is not None:
        partial.replace(file)


def _cells(chosen: list[Peer], quick: bool, threads: int) -> Iterator[Cell]:
    for peer in chosen:
        for dtype in peer.dtypes[:1] if quick else peer.dtypes:
            for mode, lengths in LENGTHS.items():
                for tokens in lengths[:1] if quick else lengths:
                    if tokens > peer.longest[mode]:
                        continue
                    yield Cell(peer, mode, dtype, tokens, *SHAPES[0], threads)
                    if tokens == min(USUAL, peer.longest[mode]) and not quick:
                        yield from (Cell(peer, mode, dtype, tokens, *shape, threads) for shape in SHAPES[1:])
                        if threads > 1:
                            yield Cell(peer, mode, dtype, tokens, *SHAPES[0], 1)


def compare(cell: Cell, rounds: int = ROUNDS) -> Row:
    """Measure one row: both sides run in turns."""
    peer, x = cell.peer, cell.inputs(cell.tokens, cell.mode != "forward")
    timed = [_timer(peer.ours, x, cell.mode), _timer(peer.load(), x, "forward" if peer.forward else cell.mode)]
    before = torch.get_num_threads()
    torch.set_num_threads(cell.threads)
    try:
        timed[0]()  # warms up ours before the peer is measured
        pairs: list[tuple[float, float]] = []
        started = time.perf_counter()
        while len(pairs) < rounds + 1 and (not pairs or time.perf_counter() - started < SECONDS):
            pairs.append((timed[0](), timed[1]()))
    finally:
        torch.set_num_threads(before)
    pairs = pairs[1:] or pairs  # drops the first round as warm-up, if there are others
    ours, other = zip(*pairs, strict=True)
    ratio = statistics.median(b / a for a, b in pairs)
    usual = (cell.dtype, (cell.heads, cell.dim), cell.threads) == (peer.dtypes[0], SHAPES[0], before)
    target = peer.targets.get((cell.mode, cell.tokens)) if usual else None
    about = (cell.mode, _name(cell.dtype), cell.tokens, cell.heads, cell.dim, cell.threads)
    return Row(peer.name, peer.what, *about, _ms(ours), _ms(other), ratio, len(pairs), target)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def _timer(run: Callable, x: Inputs, mode: str) -> Callable[[], float]:
    wanted = list(x.values())
    gradients: list[torch.Tensor] = []

    def once() -> float:
        start = time.perf_counter()
        if mode == "forward":
            with torch.no_grad():
                run(x)
        else:
            y = run(x)
            if not gradients:  # the first run is warm-up
                gradients.append(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
            torch.autograd.grad(y, wanted, gradients[0], allow_unused=True)
        return time.perf_counter() - start

    return once


def check(cell: Cell) -> None:
    """Raise ValueError if both sides should agree and do not."""
    if not cell.peer.same:
        return
    x = cell.inputs(200, gradients=False)
    a, b = cell.peer.ours(x).double(), cell.peer.load()(x).double()
    error = ((a - b).norm() / b.norm()).item()
    if not error < (1e-4 if cell.dtype == torch.float32 else 2e-2):
        raise ValueError(f"{cell.peer.what} does not compute what linattn computes: relative difference {error:.1e} in {cell.dtype}")


def _growth(tokens: int, rounds: int) -> dict[str, float]:
    """Measure our time per token with a decay per head and the delta rule, float32: flat if the work is linear."""
    row: dict[str, float] = {"tokens": tokens}
    for name, run in (("head", peers_module.head), ("gated_delta", peers_module.gated_delta)):
        for mode in LENGTHS:
            timer = _timer(run, inputs(tokens, torch.float32, gradients=mode != "forward"), mode)
            timer()
            row[f"{name} {mode}"] = statistics.median(timer() for _ in range(rounds)) / tokens * 1e6
    return row


def _line(cell: Cell, r: Row) -> str:
    return f"{cell}: ours {r.ours_ms:.2f} ms, theirs {r.theirs_ms:.2f} ms, ratio {r.ratio:.2f}"


def _print(rows: list[Row], growth: list[dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    heads = ("peer", "mode", "dtype", "tokens", "shape", "threads", "ours ms", "theirs ms", "ratio", "wanted")
    table = Table(*heads, title="median of ratios, peer / ours")
    for r in rows:
        wanted = "" if r.target is None else f"{'ok' if r.ratio >= r.target else 'MISSED'} (>= {r.target:.2g})"
        figures = (f"{r.ours_ms:.2f}", f"{r.theirs_ms:.2f}", f"{r.ratio:.2f}")
        table.add_row(r.peer, r.mode, r.dtype, str(r.tokens), f"H{r.heads} D{r.dim}", str(r.threads), *figures, wanted)
    linear = Table(*growth[0], title="microseconds a token, float32")
    for g in growth:
        linear.add_row(str(g["tokens"]), *(f"{v:.2f}" for k, v in g.items() if k != "tokens"))
    console = Console(width=None if sys.stdout.isatty() else 120)
    if rows:
        console.print(table)
    console.print(linear)


def _write(out: Path | None, rows: list[Row], growth: list[dict[str, float]]) -> None:
    if out is None:
        return
    from linattn.report.folder import write_text
    from linattn.report.machine import machine

    body = {
        "command": command("linattn", sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "rows": [asdict(r) for r in rows],
        "growth_us_per_token": growth,
    }
    write_text(out, json.dumps(body, indent=1) + "\n")
