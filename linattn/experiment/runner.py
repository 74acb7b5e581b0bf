"""The runner: which runs of a study are missing, doing them, and keeping what came out in report.json."""

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
    """report.json while it grows: what is wanted, what is done.

    A command's own record makes the report: :meth:`fill` writes what is done into it, :meth:`said` is a line of progress.
    """

    def __init__(self, folder: Folder, study: Study, settings: Any) -> None:
        self.folder, self.study, self.settings = folder, study, settings
        self.done: dict[str, dict[str, Any]] = {}
        self.failed: list[Failed] = []
        self.wanted: list[Run] = []
        self.report: dict[str, Any] = {}

    def runs(self) -> list[Run]:
        """All runs that are wanted, given what is done."""
        return self.study.runs(self.settings, self.results())

    def results(self) -> list[tuple[Run, Result]]:
        """The wanted runs that are done, with their results, in the order in which they are wanted."""
        return [(run, self.done[name]["result"]) for run in self.wanted if (name := key(run)) in self.done]

    def missing(self) -> list[Run]:
        """The wanted runs that are not done; a result may make the study want more."""
        while True:
            wanted = self.runs()
            if len(wanted) <= len(self.wanted):
                return [run for run in self.wanted if key(run) not in self.done]
            self.wanted = wanted

    def add(self, one: Finished | Failed) -> None:
        """Keep what came of a run, on disk too."""
        if isinstance(one, Failed):
            self.failed.append(one)
        else:
            self.done[key(one.run)] = self.entry(one)
        self.save()

    def entry(self, one: Finished) -> dict[str, Any]:
        """The entry of a finished run in the report."""
        return {"run": one.run, "result": finite(one.result), "seconds": round(one.seconds, 3)}

    def fill(self) -> None:
        """Write what is done into the report."""
        raise NotImplementedError

    def save(self) -> None:
        """Write report.json."""
        self.fill()
        self.folder.save(self.report)

    def said(self, one: Finished | Failed) -> str:
        """A few words on what came of a run."""
        raise NotImplementedError


def run(record: Record, title: str, *, progress: bool, end: float = math.inf) -> bool:
    """Do what is missing; begin nothing after ``end`` (of time.monotonic), and no further round after a failure.

    Returns:
        Whether nothing is missing.
    """
    bar = Progress(progress)
    while (missing := record.missing()) and time.monotonic() < end and not record.failed:
        with bar.counted(title, len(record.wanted), len(record.wanted) - len(missing)) as advance:
            for one in work(record.study, missing, end):
                record.add(one)
                advance(record.said(one))
    return not missing


def key(run: Run) -> str:
    """The key of a run's result: everything that the run says."""
    return json.dumps(run, sort_keys=True)


def finite(value: Any) -> Any:
    """``value`` with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
