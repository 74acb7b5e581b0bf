"""Command ``linattn bench ops`` on a GPU: every kind of recurrence beside other libraries' calls, on one card in one run.

A row is one :class:`~linattn.bench.gpu.cases.Case` of one library. A refusal, a crash and a
timeout are rows too and never end the run.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from linattn.bench.files import file_for
from linattn.bench.gpu import libraries
from linattn.bench.gpu.cases import DECODE, FAMILIES, FIRST, MODES, PASSES, Case, Shape, plan
from linattn.bench.gpu.measure import Figure, compile_only, first_call, measure
from linattn.bench.gpu.record import Record, about
from linattn.bench.gpu.worker import Failure, Worker

KEY = ("library", "family", "shape", "mode", "decay", "decay_dtype")
TIMEOUT = 240.0  # seconds of one figure, including compilation
COMPILING = {"FLA_CACHE_RESULTS": "0"}  # no tuning results from parallel compilation


@dataclass(frozen=True)
class Request:
    """Request of a run: empty lists mean everything. ``seconds`` limits the run; figures measured by then stay."""

    quick: bool = False
    families: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None
    seconds: float | None = None

    def check(self) -> None:
        """Raise ValueError for unknown names."""
        others = [name for name in libraries.LIBRARIES if name != "linattn"]
        for option, given, known in (
            ("--families", self.families, list(FAMILIES)), ("--modes", self.modes, list(MODES)), ("--peers", self.peers or (), others),
        ):  # fmt: skip
            if unknown := [name for name in given if name not in known]:
                raise ValueError(f"{option} must be among {', '.join(known)}, but has {', '.join(unknown)}")
        for text in self.shapes:
            Shape.parse(text)

    def cases(self, device: str) -> list[tuple[Case, bool]]:
        """Cases of a request, and whether other libraries run them too; a custom shape gets every pass of every family."""
        wanted = [Shape.parse(text) for text in self.shapes]
        planned = list(plan(quick=self.quick, device=device))
        new = [shape for shape in wanted if shape not in {case.shape for case, _ in planned}]
        planned += [(Case.of(f, s, mode), True) for s in new for f in FAMILIES for mode in (PASSES if s.T > 1 else DECODE)]
        return [
            (case, with_peers or (case.mode == FIRST and FIRST in self.modes))
            for case, with_peers in planned
            if (not self.families or case.family in self.families)
            and (not self.modes or case.mode in self.modes)
            and (not wanted or case.shape in wanted)
        ]


def run(request: Request, *, device: str = "cuda", out: Path | None = None) -> None:
    """Measure the cases of ``request``, report each figure, and add them to ``out`` (JSON, or a folder for it) if given."""
    if request.peers:
        request = replace(request, peers=tuple(name.replace("_", "-") for name in request.peers))  # accepts names of modules too
    request.check()
    facts = about(device)
    session = Session(request, device)
    with Record(out and file_for(out, "ops", facts["card"]), KEY, facts) as record:
        for row in session.rows():
            record.add(row)


class Session:
    """Run with a process for each library and a time limit."""

    def __init__(self, request: Request, device: str) -> None:
        from linattn.report.progress import Progress

        self.request, self.device = request, device
        self.started = time.monotonic()
        self.say = Progress(True).say
        self.folders: dict[str, list[str]] = {}
        self.versions: dict[str, str] = {}
        for name in libraries.LIBRARIES:
            if name == "linattn" or request.peers is None or name in request.peers:
                self._find(name)

    def _find(self, name: str) -> None:
        found = libraries.find(name, self.device)
        if isinstance(found, str):
            self.say(f"without {name}: {found}")
        else:
            self.versions[name], self.folders[name] = found

    def left(self) -> float:
        """Seconds left until the time limit."""
        return float("inf") if self.request.seconds is None else self.request.seconds - (time.monotonic() - self.started)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Measure everything, one row after the other."""
        cases = self.request.cases(self.device)
        turns = [
            (case, name) for case, peers in cases for name in self.versions if (peers or name == "linattn") and libraries.takes(name, case)
        ]
        self._compile(turns)
        with ExitStack() as stack:
            workers = {name: stack.enter_context(Worker(self.folders[name])) for name in self.versions}
            broken: set[str] = set()  # families that our kernels cannot run, so peers are skipped
            for i, (case, name) in enumerate(turns):
                if self.left() <= 0:
                    self.say(f"{len(turns) - i} figures are missing: {self.request.seconds:.0f} s are over")
                    return
                row = self._row(workers[name], case, name, case.family not in broken)
                if name == "linattn" and row["ms"] is None:
                    broken.add(case.family)
                self.say(f"{i + 1}/{len(turns)} {time.monotonic() - self.started:.0f} s  {_line(row)}")
                yield row

    def _row(self, worker: Worker, case: Case, name: str, check: bool) -> dict[str, Any]:
        shape = {"shape": str(case.shape)}
        row = {"library": name, "version": self.versions[name], **asdict(case), **shape, **asdict(Figure(ms=None))}
        timeout = min(TIMEOUT, max(self.left(), 10.0))
        try:
            if case.mode == FIRST:
                return row | self._first(case, name, timeout)
            seconds = 0.05 if self.request.quick else 0.25
            return row | worker.call(measure, name, case, self.device, seconds, check, timeout=timeout)
        except Failure as failure:
            return row | {"failure": failure.kind, "message": str(failure)}

    def _first(self, case: Case, name: str, timeout: float) -> dict[str, float]:
        """Measure forward and backward in a new process, and in a second one that reuses the first's compiler cache."""
        with tempfile.TemporaryDirectory() as cache:
            environment = {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache}
            times = []
            for _ in range(2):
                with Worker(self.folders[name], environment) as fresh:
                    times.append(fresh.call(first_call, name, case, self.device, timeout=timeout))
        return {"ms": times[0], "warm_ms": times[1]}

    def _compile(self, turns: list[tuple[Case, str]]) -> None:
        """Compile the configurations of fla's autotuners, all kernels in parallel on every core, before anything is timed."""
        kinds: dict[tuple, Case] = {}
        for case, name in turns:
            if name == "fla" and case.mode != FIRST:  # only for the last pass, whose kernels include the backward ones
                kinds[case.family, case.shape.T == 1, case.shape.H, case.shape.D, case.decay_dtype] = case
        if not kinds or self.device != "cuda":
            return
        cores = os.cpu_count() or 1
        self.say(f"compiling {len(kinds)} calls of fla on {cores} cores")
        with ThreadPoolExecutor(cores) as pool:
            waiting = {pool.submit(self._compile_one, case): case for case in kinds.values()}
            for done in as_completed(waiting):
                self.say(f"  {waiting[done]}: {done.result()}")

    def _compile_one(self, case: Case) -> str:
        if self.left() <= 0:
            return "no time left"
        try:
            with Worker(self.folders["fla"], COMPILING) as worker:
                return f"{worker.call(compile_only, 'fla', case, self.device, timeout=min(TIMEOUT, self.left())):.0f} s"
        except Failure as failure:
            return f"{failure.kind}: {failure}"[:120]


def _line(row: dict[str, Any]) -> str:
    decay = "" if row["decay"] is None else f" decay {row['decay']:g} {row['decay_dtype']}"
    what = f"{row['library']} {row['family']} {row['mode']} {row['shape']}{decay}"
    if row["ms"] is None:
        return f"{what}: {row['failure']} ({row['message'][:100]})"
    warm = "" if row["warm_ms"] is None else f", {row['warm_ms']:.0f} ms with a warm cache"
    memory = "" if row["peak_mb"] is None else f", {row['peak_mb']:.0f} MB"
    difference = "" if row["difference"] is None else f", {row['difference']:.1e} from ours"
    return f"{what}: {row['ms']:.3f} ms{warm}{memory}{difference}"
