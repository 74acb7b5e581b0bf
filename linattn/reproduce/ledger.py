"""Record of a study: report.json, from which the same command continues, and the page."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

import torch

from linattn.experiment import runner
from linattn.experiment.study import Run, Study
from linattn.experiment.workers import Failed, Finished
from linattn.report.folder import VERSION, Folder, write_text
from linattn.report.machine import machine
from linattn.reproduce import variants
from linattn.reproduce.options import ReproduceOptions
from linattn.reproduce.page import page
from linattn.state import content_of

SCHEMA = "linattn.reproduce"
WIDTH = 64  # width in studies whose runs have none
_KINDS = {"study": str, "created": str, "machines": list, "runs": list}  # required fields of a report to continue
_RUN_KINDS = {"run": dict, "result": dict, "seconds": (int, float), "machine": int}


def load(name: str) -> Study:
    """The study ``name`` of :data:`linattn.reproduce.STUDIES`."""
    return import_module(f"linattn.reproduce.{name.replace('-', '_')}").STUDY


def reproduce(options: ReproduceOptions, *, progress: bool) -> dict:
    """Implementation of :func:`linattn.reproduce.run`."""
    study = load(options.study)
    settings = _settings(study, options)
    Ledger(options, study, settings)  # validates options before the folder exists
    with Folder(options.folder, SCHEMA).held():
        return _go_on(Ledger(options, study, settings), progress=progress)  # reads the report again under the lock


def _go_on(ledger: Ledger, *, progress: bool) -> dict:
    """Execute and record the missing runs."""
    options = ledger.options
    ledger.save()
    end = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    try:
        ledger.report["complete"] = runner.run(ledger, options.study, progress=progress, end=end)
    finally:  # also after an interruption
        ledger.close()
    return ledger.report


def _settings(study: Study, options: ReproduceOptions) -> Any:
    """The study's settings with the caller's mixers and seeds."""
    settings = study.full if options.full else study.quick
    given = {name: value for name in ("mixers", "seeds") if (value := getattr(options, name)) is not None}
    settings = replace(settings, **given)
    for text in settings.mixers:
        variants.parse(text)
    return settings


class Ledger(runner.Record):
    """Record of a study, which continues an earlier report and stores the machine of every run."""

    def __init__(self, options: ReproduceOptions, study: Study, settings: Any) -> None:
        super().__init__(Folder(options.folder, SCHEMA), study, settings)
        self.options = options
        old = self.folder.load() or {}
        with content_of(self.folder.json):
            if old:
                _check(old)
        if old and old["study"] != self.options.study:
            raise ValueError(f"--out {self.folder.path} holds the study {old['study']!r}; name another folder for {self.options.study!r}")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.machine = machine()
        self.done = {runner.key(entry["run"]): entry for entry in old.get("runs", [])}
        self.report = {
            "schema": SCHEMA,
            "version": VERSION,
            "study": self.options.study,
            "title": self.study.title,
            "question": self.study.question,
            "notes": list(self.study.notes),
            "complete": False,
            "command": self.options.command(),
            "created": old.get("created", datetime.now(UTC).isoformat(timespec="seconds")),
            "machines": old.get("machines", []),
            "settings": json.loads(json.dumps(asdict(self.settings))),
            "columns": [{"key": c.key, "heading": c.heading} for c in self.study.all_columns],
            "rows": [],
            "left_out": [],
            "failures": [],
            "runs": [],
        }
        for run in self.study.runs(self.settings, []):  # validates the settings
            if run.get("mixer") in self.settings.mixers:
                variants.check(run["mixer"], run.get("dim", WIDTH))
        with content_of(self.folder.json):  # raises for results that the study cannot use
            self.missing()
            self.tabulate()

    def runs(self) -> list[Run]:
        return [{**run, "device": self.device} for run in super().runs()]

    def entry(self, one: Finished) -> dict[str, Any]:
        machines = self.report["machines"]
        if self.machine not in machines:
            machines.append(self.machine)
        return {**super().entry(one), "machine": machines.index(self.machine)}

    def fill(self) -> None:
        self.report["runs"] = list(self.done.values())
        self.report["failures"] = [{"run": one.run, "error": one.error} for one in self.failed]

    def said(self, one: Finished | Failed) -> str:
        about = " ".join(str(one.run[k]) for k in ("mixer", "task", "dim", "seed") if k in one.run)
        return f"{about}: {one.error}" if isinstance(one, Failed) else f"{about}: {one.seconds:.1f} s"

    def tabulate(self) -> None:
        """Make the table of the finished runs before the first new one, so that a killed process leaves a table."""
        results = self.results()
        self.report["rows"] = self.study.rows(self.settings, results)
        self.report["left_out"] = [{"run": run, "reason": r["left_out"]} for run, r in results if "left_out" in r]

    def close(self) -> None:
        """Make the table of the finished runs, and the page."""
        self.tabulate()
        self.save()
        counts = (len(self.results()), len(self.wanted))
        write_text(self.folder.html, page(self.report, self.study, self.settings, counts))


def _check(report: dict) -> None:
    """Raise ValueError if an earlier report does not have the form of this version."""
    _of_kinds(report, _KINDS, "the report")
    for entry in report["runs"]:
        _of_kinds(entry, _RUN_KINDS, "a run")
        if not 0 <= entry["machine"] < len(report["machines"]):
            raise ValueError(f"a run names machine {entry['machine']}, but there are {len(report['machines'])}")
    for one in report["machines"]:
        _of_kinds(one, {}, "a machine")


def _of_kinds(value: Any, kinds: dict[str, Any], name: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, but came as {value!r}")
    for key, kind in kinds.items():
        if not isinstance(value[key], kind):
            raise ValueError(f"{key} of {name} must not be a {type(value[key]).__name__}")
