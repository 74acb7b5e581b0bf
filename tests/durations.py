"""`pytest --durations-json FILE`: the processor time of every test, as data.

Processor time, including child processes, does not depend on other load. Also recorded are the costs of collection, per worker, and of
the process that distributes tests. The teardown after a worker's last test belongs to the session: shared processes of fixtures are
waited for then.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

RECORDED = Path(__file__).with_suffix(".json")
SESSION = "fixtures of the session"


def pytest_addoption(parser):
    parser.addoption("--durations-json", metavar="FILE", help="write the processor seconds of every test to FILE")


def pytest_configure(config):
    if config.option.durations_json:
        config.pluginmanager.register(Durations(config), "durations-json")


def slowest() -> dict[str, float]:
    """Recorded processor seconds of the slowest tests, by their names."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))["slowest"]


def spent() -> float:
    """Processor seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


class Durations:
    """Records on the workers; sums and writes at the end of the session (in the controller, or the only process)."""

    def __init__(self, config, clock=spent):
        self.config, self.started, self.clock = config, time.time(), clock
        self.tests: Counter[str] = Counter()
        self.collection: list[float] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self):
        before = self.clock()
        result = yield
        self.collected = self.clock() - before
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = self.clock()
        report.processor_seconds = now - getattr(item, "_spent", now)
        report.of_session = call.when == "teardown" and getattr(item, "_last", False)
        item._spent = now
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item, nextitem):
        item._last = nextitem is None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        item._spent = self.clock()

    def pytest_runtest_logreport(self, report):
        self.tests[SESSION if getattr(report, "of_session", False) else report.nodeid] += getattr(report, "processor_seconds", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.collection.append(node.workeroutput.get("collection_seconds", 0.0))

    def pytest_sessionfinish(self, session):
        if hasattr(self.config, "workerinput"):
            self.config.workeroutput["collection_seconds"] = self.collected
            return
        collection = self.collection or [self.collected]
        record = {
            "command": "python -m pytest " + " ".join(self.config.invocation_params.args),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "pytest": pytest.__version__},
            "wall_seconds": round(time.time() - self.started, 1),
            "collection_seconds": [round(seconds, 1) for seconds in collection],
            "controller_seconds": round(time.process_time(), 1) if self.collection else 0.0,
            "processor_seconds": round(sum(self.tests.values()), 1),
            "tests": len(self.tests.keys() - {SESSION}),
            "files": dict(by_file(self.tests).most_common()),
            "slowest": {name: round(seconds, 2) for name, seconds in self.tests.most_common(300)},
        }
        Path(self.config.option.durations_json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def by_file(tests: Counter[str]) -> Counter[str]:
    """Seconds by file."""
    sums: Counter[str] = Counter()
    for name, seconds in tests.items():
        sums[name.split("::")[0]] += seconds
    return Counter({file: round(seconds, 1) for file, seconds in sums.items()})
