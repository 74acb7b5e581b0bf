"""Run oracle tests and record their largest errors: ``python -m tests.oracles.record [NAME...]``, without names all.

The file is in the package, where ``linattn show`` and the atlas read it.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import linattn.mixers
from linattn.mixers.errors import FILE
from tests.oracles.compare import Error

HERE = Path(__file__).parent


def tests() -> dict[str, Path]:
    """For each mixer the file of its tests: ``test_NAME.py``, or ``test_NAME_and_OTHER.py``."""
    names = set(linattn.mixers.available())
    files = {name: path for path in sorted(HERE.glob("test_*.py")) for name in path.stem.removeprefix("test_").split("_and_")}
    return {name: path for name, path in files.items() if name in names}


class Recorder:
    """Pytest plugin that records the errors of passing tests, by file and precision."""

    def __init__(self) -> None:
        self.found: dict[Path, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._heard: list[tuple[str, float]] = []

    def pytest_runtest_setup(self) -> None:
        self._heard.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for dtype, error in self._heard:
                self.found[Path(report.nodeid.partition("::")[0])][dtype].append(error)

    def hear(self, error: float, dtype: torch.dtype) -> None:
        self._heard.append((str(dtype.to_real()).removeprefix("torch."), error))


def recorded(files: Iterable[Path]) -> Recorder:
    """Errors found by the tests in ``files``.

    Raises:
        SystemExit: where one fails.
    """
    recorder = Recorder()
    Error.listeners.append(recorder.hear)
    try:
        code = pytest.main([*map(str, sorted(files)), "-q", "-p", "no:cacheprovider"], plugins=[recorder])
    finally:
        Error.listeners.remove(recorder.hear)
    if code != pytest.ExitCode.OK:
        raise SystemExit(f"nothing was written: pytest ended with {code!r}")
    return recorder


def main(*names: str) -> None:
    known = tests()
    files = {name: known[name] for name in names or known}
    found = {path.name: errors for path, errors in recorded(set(files.values())).found.items()}
    kept = json.loads(FILE.read_text(encoding="utf-8")) if names else {}
    for name, path in files.items():
        if errors := found.get(path.name):
            largest = {dtype: float(f"{max(values):.1e}") for dtype, values in sorted(errors.items())}
            kept[name] = {"test": f"tests/oracles/{path.name}", "comparisons": sum(map(len, errors.values())), "largest": largest}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(kept.items()))
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"{FILE}: {', '.join(sorted(kept))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
