"""Runner: executes the missing runs of a study and saves their results in report.json."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from linattn.experiment.study import Result, Run, Study
from linattn.experiment.workers import Failed, Finished, work
from linattn.report.folder import Folder
from linattn.report.progress import Progress


class Record:
    """Record of requested and finished runs in report.json.

    A subclass builds the report of a command: :meth:`fill` writes the finished runs to it, :meth:`said` formats a line of progress.
    """

    def __init__(self, folder: Folder, study: Study, settings: Any) -> None:
        self.folder, self.study, self.settings = folder, study, settings
        self.done: dict[str, dict[str, Any]] = {}
        self.failed: list[Failed] = []
        self.wanted: list[Run] = []
        self.report: dict[str, Any] = {}

    def runs(self) -> list[Run]:
        """List all requested runs, given the finished ones."""
        return self.study.runs(self.settings, self.results())

    def results(self) -> list[tuple[Run, Result]]:
        """List the finished runs with their results, in the order of the requested runs."""
        return [(run, self.done[name]["result"]) for run in self.wanted if (name := key(run)) in self.done]

    def missing(self) -> list[Run]:
        """List the requested runs that are not finished; results may lead to further requests."""
        while True:
            wanted = self.runs()
            if len(wanted) <= len(self.wanted):
                return [run for run in self.wanted if key(run) not in self.done]
            self.wanted = wanted

    def add(self, one: Finished | Failed) -> None:
        """Record the outcome of a run, and save it."""
        if isinstance(one, Failed):
            self.failed.append(one)
        else:
            self.done[key(one.run)] = self.entry(one)
        self.save()

    def entry(self, one: Finished) -> dict[str, Any]:
        """Entry of a finished run in the report."""
        return {"run": one.run, "result": finite(one.result), "seconds": round(one.seconds, 3)}

    def fill(self) -> None:
        """Write the finished runs to the report."""
        raise NotImplementedError

    def save(self) -> None:
        """Write report.json."""
        self.fill()
        self.folder.save(self.report)

    def said(self, one: Finished | Failed) -> str:
        """Summarise the outcome of a run in a line."""
        raise NotImplementedError


def run(record: Record, title: str, *, progress: bool, end: float = math.inf) -> bool:
    """Execute the missing runs; start none after ``end`` (of time.monotonic), and no further round after a failure.

    Returns:
        True if all runs are finished.
    """
    bar = Progress(progress)
    while (missing := record.missing()) and time.monotonic() < end and not record.failed:
        with bar.counted(title, len(record.wanted), len(record.wanted) - len(missing)) as advance:
            for one in work(record.study, missing, end):
                record.add(one)
                advance(record.said(one))
    return not missing


def key(run: Run) -> str:
    """Key of a run's result: the whole run as JSON."""
    return json.dumps(run, sort_keys=True)


def finite(value: Any) -> Any:
    """Replace NaN and infinities in ``value`` by None, for JSON."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
