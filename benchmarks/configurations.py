"""Makes, or checks, the table of configurations that the GPU kernels look up: ``python -m benchmarks.configurations --write``.

Every row of linattn/ops/triton/table.json is run as it stands, and then, unless ``--check`` asks for no more, with its neighbours:
one block twice or half as large, other warps, another depth of the pipeline. Each runs in another process, where a crash or a hang
hurts nobody else, and is held in all values and gradients to the limits of the tests against the portable form in float64. What is
right is timed, alone on the device, by the kernels that the row configures. With ``--write`` the fastest takes the row, if it is 3 %
faster than what was there and right in every call that the row serves. The conditions of the rows stay as they are.

The rows serve devices and sizes without kernels of Hopper's own, so those are switched off here. Measures what matters most first;
a row that ``--seconds`` leaves no time for stays as it is, and the log says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from linattn.bench.gpu.worker import Failure, Worker
from linattn.ops.triton import table

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
FASTER = 0.97  # of the present time, for a row to change
TIMED = 2  # calls of a row that candidates run in; what is written is checked in all
PATIENCE = 240.0  # seconds that one call may take, compilation included
SHARES = (0.35, 0.7, 0.88)  # of the time, until which the present rows are checked, candidates checked, and candidates timed

Place = tuple[str, int]  # a row: its kind and number
RANKS = {"none": table.NONE, "BTH": table.HEAD, "BTHK": table.CHANNEL}
RULES = {"plain": table.PLAIN, "beta": table.DELTA, "erase": table.ERASE, "bonus": table.PLAIN}
# What to time a rule with a decay by: families of linattn.bench.gpu.cases, what matters most first.
FAMILIES = {
    ("beta", "BTH"): "gated_delta", ("plain", "BTH"): "head", ("beta", "BTHK"): "kda", ("erase", "BTHK"): "erase",
    ("plain", "BTHK"): "channel", ("plain", "none"): "none", ("beta", "none"): "delta", ("bonus", "BTHK"): "rwkv6",
}  # fmt: skip


@dataclass(frozen=True)
class Chunks:
    """A call of the chunked form, with keys and values of ``size`` channels, over several segments."""

    kind: str
    rank: str
    dtype: str
    size: int
    shared: bool = False  # one head of keys for two of values: gradients then have a kernel where nothing decays, too

    def __str__(self) -> str:
        return f"{self.kind} {self.rank} {self.dtype} {self.size}{' shared keys' if self.shared else ''}"

    @property
    def asks(self) -> set[Place]:
        """The rows that a forward and a backward pass look up."""
        call = {"rule": table.RULES[RULES[self.kind]], "decay": table.DECAYS[RANKS[self.rank]], "before": self.kind == "bonus"}
        call |= {"half": self.dtype == "bfloat16", "keys": self.size}
        wanted = [("forward", True), ("forward", False), ("backward", True), *([] if INTERPRETED else [("backward", False)])]
        found = {(kind, _find(kind, {**call, "outputs": outputs})) for kind, outputs in wanted}
        if (self.kind, self.rank) != ("plain", "none") or self.shared:  # whose gradients are the scans themselves
            found.add(("gradients", _find("gradients", call)))
        if self.kind != "plain" or self.rank == "BTHK":
            found.add(("prepare", _find("prepare", call)))
        return found

    def ratios(self) -> dict[str, float]:
        """By result and gradient, the error over what is allowed."""
        from tests.ops import cases
        from tests.ops.errors import admitted
        from tests.ops.triton import device

        dtype = getattr(torch, self.dtype)
        size = dict(B=1, T=20 if INTERPRETED else 1100, H=2, Hk=1 if self.shared else 2, K=self.size, V=self.size)
        for seed in range(20):
            call = cases.make(self.kind, self.rank, **size, seed=seed)
            if self.kind not in ("beta", "erase") or admitted(device.here(call).to(dtype)):
                return device.ratios(call, dtype)
        raise ValueError(f"no tame call of {self} in 20 draws")

    @property
    def timed(self) -> bool:
        return (self.kind, self.rank) in FAMILIES

    def step(self) -> Callable[[], object]:
        """A forward and a backward pass at a size that is worth timing."""
        import linattn
        from linattn.bench.gpu import cases

        shape = cases.Shape(1, 20, 1, self.size) if INTERPRETED else cases.Shape(1, 16384 if self.size <= 128 else 8192, 16, self.size)
        x = cases.tensors(cases.Case.of(FAMILIES[self.kind, self.rank], shape, "forward+backward"), DEVICE, 0)
        if self.dtype == "float32":
            x = {name: t.float() for name, t in x.items()}
        if self.shared:
            x |= {name: x[name][:, :, :1].contiguous() for name in "qk"}

        def run(x: dict[str, torch.Tensor]) -> torch.Tensor:
            erase = (x["read"], x["write"]) if "read" in x else None
            others = {name: x.get(name) for name in ("decay", "beta", "bonus")}
            return linattn.linear_attention(x["q"], x["k"], x["v"], erase=erase, **others, backend="triton")

        return _with_gradients(run, x, x["v"])


@dataclass(frozen=True)
class Scan:
    """A call of both elementwise scans; of the dtypes that decay and values have, with B and T as they are timed."""

    batch: int
    tokens: int
    decay: str
    values: str
    packed: bool = False
    constant: bool = False
    timed: bool = True

    def __str__(self) -> str:
        words = f"{' packed' if self.packed else ''}{' constant' if self.constant else ''}"
        return f"scan B{self.batch} T{self.tokens} {self.decay} {self.values}{words}"

    @property
    def asks(self) -> set[Place]:
        call = {"short": self.tokens <= 8, "packed": self.packed, "shared": not self.constant and self.batch == 1}
        call |= {f"{name}_bytes": getattr(torch, getattr(self, of)).itemsize for name, of in (("decay", "decay"), ("value", "values"))}
        return {("elementwise", _find("elementwise", {**call, "backward": backward})) for backward in (False, True)}

    def ratios(self) -> dict[str, float]:
        import linattn
        from tests.ops.errors import error
        from tests.ops.triton import test_elementwise as tests

        packed = {"cu_seqlens": torch.tensor([0, 0, 7, 1500, 1501, 3000], device=DEVICE)} if self.packed else {}
        rows = 5 if self.packed else self.batch
        width = 512 if self.batch == 1 else 2048
        rank, dtype = "D" if self.constant else "BTD", getattr(torch, self.values)
        tokens = min(self.tokens, 3000 if self.batch == 1 else 600)
        a = tests.arguments(DEVICE, tokens, self.batch, width, rank=rank, dtype=dtype, N=rows)
        a["decay"] = a["decay"].to(getattr(torch, self.decay))

        def portable(kind: str, a: dict[str, torch.Tensor], **options) -> tuple:
            function = linattn.diagonal_scan if kind == "sum" else linattn.running_max
            return function(a["decay"], a["x"], initial_state=a["initial"], return_state=True, backend="torch", **options)

        found = {}
        value, gradient = tests.LIMIT[dtype]
        names = ("values", "state", "gradient of decay", "gradient of x", "gradient of the state")
        for kind in tests.KINDS:
            mine = tests.results(tests.door, kind, a, **packed)
            wanted = tests.results(portable, kind, {name: t.double() for name, t in a.items()}, **packed)
            for name, m, w in zip(names, mine, wanted, strict=True):
                finite = w.isfinite()
                same = torch.equal(m.double()[~finite], w[~finite])
                limit = gradient if name.startswith("gradient") else value
                found[f"{kind}: {name}"] = error(m[finite], w[finite], floor=1e-30) / limit if same else math.inf
        return found

    def step(self) -> Callable[[], object]:
        import linattn
        from linattn.bench.gpu import cases

        case = cases.Case("scan", cases.Shape(self.batch, self.tokens, 16, 128), "forward+backward", cases.DECAY, self.decay)
        x = cases.tensors(case, DEVICE, 0)
        x["b"] = x["b"].to(getattr(torch, self.values))
        if self.constant:
            x["decay"] = x["decay"][0, 0].contiguous()
        ends = torch.arange(0, self.tokens + 1, self.tokens // 8, device=DEVICE) if self.packed else None
        return _with_gradients(lambda x: linattn.diagonal_scan(x["decay"], x["b"], cu_seqlens=ends, backend="triton"), x, x["b"])


@dataclass(frozen=True)
class Step:
    """One token for each of ``batch`` sequences of 16 heads."""

    kind: str
    rank: str
    batch: int
    timed: bool = True

    def __str__(self) -> str:
        return f"step {self.kind} {self.rank} B{self.batch}"

    @property
    def asks(self) -> set[Place]:
        return {("decode", _find("decode", {"columns": self.batch * 16 * 128}))}

    def ratios(self) -> dict[str, float]:
        from linattn.ops.triton import decode
        from tests.ops import cases
        from tests.ops.errors import error
        from tests.ops.triton import test_decode as tests

        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            x = tests.inputs(cases.make(self.kind, self.rank, B=self.batch, T=2, H=16, K=128, V=128), dtype)
            out, wanted = tests.named(decode.recurrent(x)), tests.exact(x)
            found |= {f"{n}, {dtype}": error(out[n], w) / (tests.LIMIT[dtype] if n == "o" else 2e-6) for n, w in wanted.items()}
        return found

    def milliseconds(self, seconds: float) -> float:
        from linattn.bench.gpu import cases, measure

        case = cases.Case.of(FAMILIES[self.kind, self.rank], cases.Shape(self.batch, 1, 16, 128), "decode")
        return measure.measure("linattn", case, DEVICE, seconds, False)["ms"]


Call = Chunks | Scan | Step


def _with_gradients(run: Callable, x: dict[str, torch.Tensor], like: torch.Tensor) -> Callable[[], object]:
    leaves = [t.requires_grad_() for t in x.values()]
    gradient = torch.randn_like(like)
    return lambda: torch.autograd.grad(run(x), leaves, gradient)


def calls() -> Iterator[Call]:
    """What the rows serve, what matters most first."""
    kinds = [*FAMILIES, ("erase", "none"), ("erase", "BTH"), ("bonus", "none"), ("bonus", "BTH")]
    if INTERPRETED:
        yield Chunks("beta", "BTH", "float32", 4)  # does everything run?
        return
    yield from (Chunks(kind, rank, "bfloat16", 128) for kind, rank in kinds)
    yield Chunks("plain", "none", "bfloat16", 128, shared=True)
    yield Scan(1, 32768, "bfloat16", "bfloat16")
    yield Scan(1, 32768, "float32", "bfloat16")
    yield from (Step(kind, "BTHK" if kind == "erase" else "BTH", batch) for batch in (64, 1) for kind in ("beta", "plain", "erase"))
    yield from (Chunks(kind, rank, "bfloat16", 64) for kind, rank in kinds)
    yield from (Chunks(kind, rank, "bfloat16", 256) for kind, rank in kinds)
    yield from (Scan(8, 4096, decay, "bfloat16") for decay in ("bfloat16", "float32"))
    yield Scan(1, 32768, "float32", "bfloat16", packed=True)
    yield Scan(64, 4, "float32", "bfloat16")
    yield Scan(1, 32768, "float32", "float32")
    yield Scan(1, 32768, "float32", "bfloat16", constant=True)
    yield from (Chunks(kind, rank, "float32", size) for size in (128, 256) for kind, rank in kinds)
    yield Chunks("plain", "none", "float32", 128, shared=True)


asked: list[Place] = []  # by this process, the last one last


@contextmanager
def configured(rows: table.Rows) -> Iterator[None]:
    """The kernels of Triton with the configurations of ``rows``, and :data:`asked` from empty on."""
    from linattn.ops.triton import hopper, launch

    if INTERPRETED:
        from tests.ops.triton import interpreter  # noqa: F401

    def find(kind: str, call: dict) -> int:
        number = _find(kind, call)
        asked.append((kind, number))
        return number

    hopper._hopper = lambda device: False
    table.find = find
    table.install(rows)
    for name, lookup in _lookups.items():  # as they are without what they keep
        setattr(table, name, lookup)
    launch._programs.clear()
    launch._compiled.clear()
    asked.clear()
    try:
        yield
    finally:
        table.find = _find


_find = table.find
_lookups = {name: getattr(table, name).__wrapped__ for name in table.KEPT}


def checked(call: Call, rows: table.Rows, place: Place | None, warm: bool) -> dict[str, float]:
    """The ratios of ``call``, which is to ask for the row ``place``; if it is to be ``warm``, what it is timed by is compiled."""
    torch.set_num_threads(1)
    with configured(rows):
        wanted = call.asks if place is None else {place}
        ratios = call.ratios()
        if not wanted <= set(asked):
            raise AssertionError(f"{call} asks for {sorted(set(asked))}, and was to ask for {sorted(wanted)}")
        if warm and not isinstance(call, Step):
            call.step()()
        if not INTERPRETED:
            torch.cuda.synchronize()  # a fault belongs to the call that made it
            torch.cuda.empty_cache()  # many processes share the device
    return ratios


def milliseconds(call: Call, rows: table.Rows, place: Place, seconds: float) -> float:
    """The median time of the kernels in one pass of ``call`` that the row ``place`` configures."""
    from linattn.bench.gpu import timing
    from linattn.ops.triton import launch

    with configured(rows):
        if isinstance(call, Step):
            return call.milliseconds(seconds)
        if isinstance(call, Scan) and call.tokens <= 8:  # launches would be all that is measured
            return timing.graph_milliseconds([call.step()], seconds)
        kind = {"elementwise": ("forward", "backward")}.get(place[0], place[:1])
        marks: list[tuple[Any, Any]] = []
        plain = launch.Recorder

        class Timed(plain):
            """Marks the launches of kernels whose configuration is the one that was asked for last."""

            def launch(self, kernel, *arguments, **constants) -> None:
                if kernel.fn.__name__ not in kind or asked[-1] != place:
                    return super().launch(kernel, *arguments, **constants)
                before = _mark()
                super().launch(kernel, *arguments, **constants)
                marks.append((before, _mark()))
                return None

        known, launch.KNOWN, launch.Recorder = launch.KNOWN, False, Timed  # else launches would be replayed
        try:
            return _median(call.step(), marks, seconds)
        finally:
            launch.KNOWN, launch.Recorder = known, plain


def _median(step: Callable[[], object], marks: list, seconds: float) -> float:
    """Of passes over ``seconds`` or, where those are long, of three."""
    for _ in range(2):  # the first one loads the kernels
        start = time.perf_counter()
        step()
        if not INTERPRETED:
            torch.cuda.synchronize()
    assert marks, "the pass has launched no kernel of the row"
    count = 1 if INTERPRETED else int(min(max(seconds / (time.perf_counter() - start), 3), 50))
    passes = []
    for _ in range(count):  # queued without waiting, so that no launch is waited for
        marks.clear()
        step()
        passes.append(list(marks))
    if INTERPRETED:
        return statistics.median(1e3 * sum(b - a for a, b in pairs) for pairs in passes)
    torch.cuda.synchronize()
    return statistics.median(math.fsum(a.elapsed_time(b) for a, b in pairs) for pairs in passes)


def _mark():
    if INTERPRETED:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def neighbours(kind: str, row: table.Row) -> list[table.Config | table.Elementwise | table.Decode]:
    """Configurations one change away from that of ``row``, of those that its kernels are made for."""
    use = row.use
    fields = {name: now for name, now in use._asdict().items() if now}
    found = [use._replace(**{name: value}) for name, now in fields.items() for value in _values(kind, row, name, now)]
    if isinstance(use, table.Elementwise):
        from linattn.ops.triton.elementwise import REGISTERS

        found = [c for c in found if REGISTERS // (c.spans * c.programs) >= 32]
    return found


def _values(kind: str, row: table.Row, name: str, now: int) -> list[int]:
    """What ``name`` may be instead of ``now``."""
    least = 16 if row.when.get("half") is False else table.NARROWEST
    double = (now // 2, now * 2)
    short = row.when.get("short") is True  # one tile has to hold all tokens
    values, allowed = {
        "bk": (double, range(least, 129)),
        "bv": (double, range(least, 129)),
        "warps": (double, range(2 if row.when.get("half") is False else 4, 9)),
        "stages": ((now - 1, now + 1), range(1, 1 if kind in ("prepare", "elementwise") else 5)),
        "span": ((now - 8, now + 8), range(8, 1 if short else 41)),
        "spans": (double, range(2, 1 if short else 17)),
        "channels": ((), range(0)),
        "programs": (double if short else (now - 1, now + 1), range(1, 33)),
        "columns": (double, range(4, 65)),
        "numbers": (double, range(8, 65)),
    }[name]
    return [value for value in values if value in allowed]


@dataclass
class Candidate:
    """One configuration of a row, what came of its calls, and their times."""

    config: Any
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)  # by call
    failures: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)  # by call, ms
    reached: bool = True

    @property
    def ms(self) -> float | None:
        return math.exp(statistics.fmean(map(math.log, self.times.values()))) if self.times else None

    @property
    def right(self) -> bool:
        return self.reached and not self.failures

    def take(self, call: Call, result: object) -> None:
        """What :func:`checked` gave: ratios, a :class:`Failure`, or None, if the time was over before."""
        if result is None:
            self.reached = False
        elif isinstance(result, Failure):
            self.failures.append(f"{call}: {result.kind}: {result}")
        else:
            self.ratios[str(call)] = result
            wrong = {name: round(ratio, 3) for name, ratio in result.items() if not ratio <= 1}
            self.failures += [f"{call}: errors over what is allowed: {wrong}"] if wrong else []

    def log(self) -> dict:
        worst = max(((r, f"{call}: {name}") for call, of in self.ratios.items() for name, r in of.items()), default=(None, None))
        nearest = {"of_limit": round(worst[0], 4) if worst[0] is not None and math.isfinite(worst[0]) else None, "in": worst[1]}
        times = {call: round(ms, 5) for call, ms in self.times.items()}
        return {**self.config._asdict(), "reached": self.reached, "failures": self.failures, "nearest": nearest, "ms": times}


def changed(rows: table.Rows, place: Place, config: Any) -> table.Rows:
    """``rows`` with another configuration in one of them."""
    kind, number = place
    return {**rows, kind: tuple(row._replace(use=config) if i == number else row for i, row in enumerate(rows[kind]))}


class Search:
    """The rows that were asked for, their calls, and everything that is found out about them."""

    def __init__(self, rows: table.Rows, places: Sequence[Place], workers: int, seconds: float) -> None:
        from linattn.report.progress import Progress

        table.install(rows)
        self.rows, self.workers, self.seconds, self.started = rows, workers, seconds, time.monotonic()
        self.progress = Progress(shown=True)
        self.calls: dict[Place, list[Call]] = {}
        for call in calls():
            asks = call.asks
            for place in [place for place in places if place in asks]:
                self.calls.setdefault(place, []).append(call)
        self.places = list(self.calls)  # in the order of what matters
        self.idle = [place for place in places if place not in self.calls]
        self.present = {place: Candidate(_row(rows, place).use) for place in self.places}
        self.others: dict[Place, list[Candidate]] = {place: [] for place in self.places}
        self.chosen: dict[Place, Candidate] = dict(self.present)

    @property
    def passed(self) -> float:
        return time.monotonic() - self.started

    def run(self, what: str, tasks: Sequence[tuple], share: float) -> list:
        """The results of ``tasks``, functions with arguments, in other processes; None of what the time did not reach."""
        end = self.started + self.seconds * share
        results: list = [None] * len(tasks)
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(tasks)):
            waiting.put(i)
        done = [0]

        def work() -> None:
            with Worker() as worker:
                while (left := end - time.monotonic()) > 0:
                    try:
                        i = waiting.get_nowait()
                    except queue.Empty:
                        return
                    try:
                        results[i] = worker.call(*tasks[i], timeout=min(left, PATIENCE))
                    except Failure as failure:
                        over = failure.kind == "timed out" and left < PATIENCE
                        if not over and failure.kind != "out of memory":  # which says nothing of the call: others share the device
                            results[i] = failure
                        if not over:
                            self.progress.say(f"{what}: {' '.join(_named(tasks[i]))}: {failure.kind}: {failure}")
                    done[0] += 1
                    if done[0] % max(1, len(tasks) // 5) == 0 or done[0] == len(tasks):
                        self.progress.say(f"{what}: {done[0]} of {len(tasks)}, {self.passed:.0f} s")

        threads = [threading.Thread(target=work) for _ in range(min(self.workers, len(tasks)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def check(self, share: float) -> None:
        """Every call of the rows with what is in them now."""
        every = list(dict.fromkeys(call for call in calls() if call.asks & set(self.places)))
        warm = {call for place in self.places for call in self.timed(place)} if share < 1 else set()
        results = self.run("checking", [(checked, call, self.rows, None, call in warm) for call in every], share)
        for call, result in zip(every, results, strict=True):
            for place in call.asks & set(self.places):
                self.present[place].take(call, result)

    def try_neighbours(self) -> None:
        """All neighbours of rows, each in the calls that it will be timed in."""
        tasks = []
        for place in self.places:
            for config in neighbours(place[0], _row(self.rows, place)):
                candidate = Candidate(config)
                self.others[place].append(candidate)
                rows = changed(self.rows, place, config)
                tasks += [(candidate, call, (checked, call, rows, place, True)) for call in self.timed(place)]
        results = self.run("trying neighbours", [task for _, _, task in tasks], SHARES[1])
        for (candidate, call, _), result in zip(tasks, results, strict=True):
            candidate.take(call, result)

    def timed(self, place: Place) -> list[Call]:
        return [call for call in self.calls[place] if call.timed][:TIMED]

    def time(self, each: float = 0.1) -> None:
        """What is right, one after the other, the present one first and last; of its two times the shorter one counts."""
        tasks = []
        for place in self.places:
            right = [candidate for candidate in self.others[place] if candidate.right]
            if not right:
                continue
            for call in self.timed(place):
                turns = [self.present[place], *right, self.present[place]]
                tasks += [(c, call, (milliseconds, call, changed(self.rows, place, c.config), place, each)) for c in turns]
        workers, self.workers = self.workers, 1  # alone on the device
        results = self.run("timing", [task for _, _, task in tasks], SHARES[2])
        self.workers = workers
        for (candidate, call, _), result in zip(tasks, results, strict=True):
            if isinstance(result, float):
                candidate.times[str(call)] = min(result, candidate.times.get(str(call), math.inf))
            elif result is not None:
                candidate.failures.append(f"{call}: {result.kind}: {result}")

    def choose(self) -> None:
        """The fastest of each row; those that changed are checked together, in every call that they serve."""
        for place in self.places:
            now = self.present[place]
            whole = {str(call) for call in self.timed(place)}
            best = min((c for c in self.others[place] if c.times.keys() == whole), key=lambda c: c.ms, default=None)
            if best is not None and (now.failures or (now.times.keys() == whole and best.ms <= FASTER * now.ms)):
                self.chosen[place] = best
        new = {place: c for place, c in self.chosen.items() if c is not self.present[place]}
        every = list(dict.fromkeys(call for place in new for call in self.calls[place]))
        results = self.run("checking what is new", [(checked, call, self.new_rows(), None, False) for call in every], 1.0)
        for call, result in zip(every, results, strict=True):
            for place in call.asks & new.keys():
                new[place].take(call, result)
        for place, candidate in new.items():
            if not candidate.right:
                self.chosen[place] = self.present[place]

    def new_rows(self) -> table.Rows:
        rows = self.rows
        for place, candidate in self.chosen.items():
            rows = changed(rows, place, candidate.config)
        return rows

    def log(self) -> list[dict]:
        """A row for each row."""
        return [
            {
                "kind": place[0], "number": place[1], "when": _row(self.rows, place).when, "calls": [str(c) for c in self.calls[place]],
                "present": self.present[place].log(), "neighbours": [c.log() for c in self.others[place]],
                "chosen": self.chosen[place].config._asdict(), "changed": self.chosen[place] is not self.present[place],
            }
            for place in self.places
        ]  # fmt: skip

    def failed(self) -> list[str]:
        """Why the rows that now stand are not right, or not known to be."""
        lines = [f"{_name(place)}: no call asks for it" for place in self.idle]
        for place, candidate in self.chosen.items():
            lines += [f"{_name(place)}: {failure}" for failure in candidate.failures]
            lines += [] if candidate.reached else [f"{_name(place)}: not every call of it was reached in --seconds {self.seconds:g}"]
        return lines


def _row(rows: table.Rows, place: Place) -> table.Row:
    return rows[place[0]][place[1]]


def _name(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _named(task: tuple) -> list[str]:
    """What a line says of a task: its call and, if it is one row's, the row and its configuration."""
    _, call, rows, place, *_ = task
    return [str(call)] if place is None else [str(call), _name(place), str(_row(rows, place).use)]


def wanted_places(rows: table.Rows, names: Sequence[str] | None) -> list[Place]:
    """The rows that ``names``, kinds or kinds with a number, mean; all without names."""
    every = [(kind, number) for kind, of_kind in rows.items() for number in range(len(of_kind))]
    for name in names or ():
        if not any(name in (kind, f"{kind}:{number}") for kind, number in every):
            raise ValueError(f"--rows takes {', '.join(rows)}, each alone or with the number of a row (forward:0), but has {name!r}")
    return [place for place in every if not names or place[0] in names or _name(place) in names]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.configurations", description=__doc__.split("\n")[0])
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="only check the rows as they are, each in every call that it serves")
    how.add_argument("--write", action="store_true", help="write the fastest back into the table; without it they are only logged")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="a kind (forward) or a row (forward:0); all of them without")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long; rows that were not reached stay")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--table", type=Path, default=table.FILE, help="the table to read, and with --write to write")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file for the log, or a folder for configurations-CARD.json")
    options = parser.parse_args(arguments)
    if not (INTERPRETED or torch.cuda.is_available()):
        print("python -m benchmarks.configurations needs an NVIDIA GPU, and torch sees none", file=sys.stderr)
        return 2
    rows = table.read(options.table)
    try:
        places = wanted_places(rows, options.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    search = Search(rows, places, options.workers, options.seconds)
    search.check(1.0 if options.check else SHARES[0])
    if not options.check:
        search.try_neighbours()
        search.time()
        search.choose()
    if options.write:
        table.write(search.new_rows(), options.table)
    return report(search, options)


def report(search: Search, options: argparse.Namespace) -> int:
    """The log, and its summary on the screen."""
    from linattn.bench.files import command, file_for
    from linattn.bench.gpu.record import about
    from linattn.report.folder import write_text

    machine = about(DEVICE)
    body = {
        "schema": "linattn.configurations", **machine, "command": command("python -m benchmarks.configurations", sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"), "seconds": round(search.passed), "rows": search.log(),
    }  # fmt: skip
    path = file_for(options.out, "configurations", machine["card"])
    write_text(path, json.dumps(body, indent=1) + "\n")
    for place in search.places:
        now, new = search.present[place], search.chosen[place]
        state = f"{len(now.ratios)} of {len(search.calls[place])} calls right" if not now.failures else f"{len(now.failures)} calls wrong"
        times = "" if now.ms is None else f", {now.ms:.4f} ms"
        change = f" -> {new.config} {new.ms:.4f} ms" if new is not now else ""
        print(f"  {_name(place):14} {now.config}: {state}{times}{change}")
    failed = search.failed()
    print("\n".join(failed), end="\n" * bool(failed))
    print(f"{len(search.places)} rows, {len(failed)} complaints, {search.passed:.0f} s: {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
