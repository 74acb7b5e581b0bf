"""Search: the neighbours of each row are checked in other processes, timed one after the other, and the fastest chosen."""

from __future__ import annotations

import math
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.configurations.calls import Call, Place, calls
from benchmarks.configurations.measure import checked, milliseconds
from linattn.bench.gpu.worker import Failure, Worker
from linattn.ops.triton import table

FASTER = 0.97  # of the present time, for a row to change
TIMED = 2  # calls of a row that candidates run in; what is written is checked in all
PATIENCE = 240.0  # seconds that one call may take, compilation included
SHARES = (0.35, 0.7, 0.88)  # of the time, until which the present rows are checked, candidates checked, and candidates timed


def neighbours(kind: str, row: table.Row) -> list[table.Config | table.Elementwise | table.Decode]:
    """Configurations one change away from that of ``row``, among those that its kernels support."""
    use = row.use
    fields = {name: now for name, now in use._asdict().items() if now}
    found = [use._replace(**{name: value}) for name, now in fields.items() for value in _values(kind, row, name, now)]
    if isinstance(use, table.Elementwise):
        from linattn.ops.triton.scan import REGISTERS

        found = [c for c in found if REGISTERS // (c.spans * c.programs) >= 32]
    return found


def _values(kind: str, row: table.Row, name: str, now: int) -> list[int]:
    """Values of ``name`` to try instead of ``now``."""
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
    """Candidate configuration of a row, the results of its calls, and their times."""

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
        """Store the result of :func:`checked`: ratios, a :class:`Failure`, or None if the time ran out."""
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
    """Copy ``rows`` with another configuration in one of them."""
    kind, number = place
    return {**rows, kind: tuple(row._replace(use=config) if i == number else row for i, row in enumerate(rows[kind]))}


class Search:
    """Search over the requested rows and their calls, with all results."""

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
        """Run ``tasks``, functions with arguments, in other processes; None for those that the time did not reach."""
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
        """Check every call of the rows with their present configurations."""
        every = list(dict.fromkeys(call for call in calls() if call.asks & set(self.places)))
        warm = {call for place in self.places for call in self.timed(place)} if share < 1 else set()
        results = self.run("checking", [(checked, call, self.rows, None, call in warm) for call in every], share)
        for call, result in zip(every, results, strict=True):
            for place in call.asks & set(self.places):
                self.present[place].take(call, result)

    def try_neighbours(self) -> None:
        """Check all neighbours of rows, each in the calls that it will be timed in."""
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
        """Time correct candidates one after the other, the present one first and last, of whose two times the shorter counts."""
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
        """Choose the fastest of each row; changed rows are checked together, in every call that they serve."""
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
        """Make a log entry for each row."""
        return [
            {
                "kind": place[0], "number": place[1], "when": _row(self.rows, place).when, "calls": [str(c) for c in self.calls[place]],
                "present": self.present[place].log(), "neighbours": [c.log() for c in self.others[place]],
                "chosen": self.chosen[place].config._asdict(), "changed": self.chosen[place] is not self.present[place],
            }
            for place in self.places
        ]  # fmt: skip

    def failed(self) -> list[str]:
        """Reason why the present rows are wrong, or not known to be right."""
        lines = [f"{name_of(place)}: no call asks for it" for place in self.idle]
        for place, candidate in self.chosen.items():
            lines += [f"{name_of(place)}: {failure}" for failure in candidate.failures]
            lines += [] if candidate.reached else [f"{name_of(place)}: not every call of it was reached in --seconds {self.seconds:g}"]
        return lines


def _row(rows: table.Rows, place: Place) -> table.Row:
    return rows[place[0]][place[1]]


def name_of(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _named(task: tuple) -> list[str]:
    """Describe a task in a line: its call and, for one row, the row and its configuration."""
    _, call, rows, place, *_ = task
    return [str(call)] if place is None else [str(call), name_of(place), str(_row(rows, place).use)]


def wanted_places(rows: table.Rows, names: Sequence[str] | None) -> list[Place]:
    """Rows selected by ``names``, kinds or kinds with a number; all without names."""
    every = [(kind, number) for kind, of_kind in rows.items() for number in range(len(of_kind))]
    for name in names or ():
        if not any(name in (kind, f"{kind}:{number}") for kind, number in every):
            raise ValueError(f"--rows takes {', '.join(rows)}, each alone or with the number of a row (forward:0), but has {name!r}")
    return [place for place in every if not names or place[0] in names or name_of(place) in names]
