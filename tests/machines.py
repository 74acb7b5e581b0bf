"""The suites of ops, conformance and oracles on other machines' code paths, each setting in a separate process.

    python -m tests.machines                          every setting, whole suites: about a quarter of an hour of a quiet core each
    python -m tests.machines --slice                  tests that rounding has broken before, in minutes: CI's
    python -m tests.machines --only avx2 -- -k gla    one setting, with arguments of pytest

Rounding in products depends on the processor's vector instructions and vendor, and on the number of threads. The variables below select
other code paths of MKL, oneDNN, torch's loops and our CPU kernels, all at once, as on an older machine; setting a single one in the
environment shows which library's path a failure is of. Unsupported settings fall back to the best available path.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "old": {  # baseline x86-64; MKL's path on processors of other vendors
        "MKL_CBWR": "COMPATIBLE",
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",  # products of bfloat16 are emulated then
        "LINATTN_CPU_ISA": "portable",
    },
    "avx2": {
        "MKL_CBWR": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "LINATTN_CPU_ISA": "avx2",
        "OMP_NUM_THREADS": "2",
        "MKL_NUM_THREADS": "2",
    },
    "threads-8": {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "8"},
}
COMMON = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # oversubscribed threads must not spin
    "TOKENIZERS_PARALLELISM": "false",
}
SUITES = ("tests/ops", "tests/conformance", "tests/oracles")
TRITON = ("--ignore=tests/ops/triton", "--ignore=tests/ops/test_triton.py")  # its interpreter computes with numpy
SLICE = (
    "tests/ops/test_identities.py",
    "tests/ops/test_scan.py",
    "tests/oracles/test_softmax.py",
    "tests/oracles/test_ca_stream.py",
    "tests/conformance/test_mixers.py",
    "-k", "identities or equal or banded or 1e9 or finite or feed-forward.rows",
)  # fmt: skip
MINUTE = 60.0
NO_TESTS = 5  # pytest's exit status without tests


@dataclass(frozen=True)
class Outcome:
    """Result of one setting: pytest's exit status, its last line, and the time."""

    green: bool
    last: str
    seconds: float


def run(name: str, tests: list[str], log: Path) -> Outcome:
    """Run ``tests`` under the setting ``name``; what pytest writes goes to ``log``."""
    variables = COMMON | SETTINGS[name]
    begun = time.monotonic()
    with log.open("w") as file:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", *TRITON, *tests]
        code = subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    lines = log.read_text().strip().splitlines() or ["nothing"]
    return Outcome(code in (0, NO_TESTS), lines[-1], time.monotonic() - begun)


def progress(log: Path) -> str:
    """Progress printed by pytest."""
    found = re.findall(r"\[ *(\d+%)\]$", log.read_text() if log.exists() else "", re.MULTILINE)
    return found[-1] if found else "0%"


def sweep(names: list[str], tests: list[str], jobs: int, folder: Path) -> dict[str, Outcome]:
    """Run every setting of ``names``, ``jobs`` at a time; reports each finished one, and every minute those still running."""
    folder.mkdir(parents=True, exist_ok=True)
    logs, outcomes = {name: folder / f"{name}.log" for name in names}, {}
    for log in logs.values():
        log.unlink(missing_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[Outcome], str] = {pool.submit(run, name, tests, logs[name]): name for name in names}
        while running:
            done, _ = wait(running, MINUTE, FIRST_COMPLETED)
            for future in done:
                name = running.pop(future)
                outcome = outcomes[name] = future.result()
                print(f"{name}: {'green' if outcome.green else 'RED'}, {outcome.last}", flush=True)
                if not outcome.green:
                    print(logs[name].read_text(), flush=True)
            if not done:
                print(", ".join(f"{name} {progress(logs[name])}" for name in running.values() if logs[name].exists()), flush=True)
    return {name: outcomes[name] for name in names}


def summary(outcomes: dict[str, Outcome]) -> str:
    """A line for each setting: its name, result, seconds and variables."""
    lines = []
    for name, outcome in outcomes.items():
        variables = " ".join(f"{key}={value}" for key, value in SETTINGS[name].items())
        lines.append(f"{name:17} {'green' if outcome.green else 'RED':5} {outcome.seconds:6.0f} s  {variables}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__.splitlines()[0])
    parser.add_argument("--slice", action="store_true", help="only the tests that rounding has turned red before")
    parser.add_argument("--only", choices=SETTINGS, action="append", help="this setting; may be given several times")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="settings at a time (default: the cores)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "machines", help="where each setting's output goes")
    parser.add_argument("tests", nargs="*", help="arguments of pytest, behind --")
    asked = parser.parse_args()
    suites = SLICE if asked.slice else () if any(t.startswith("tests/") for t in asked.tests) else SUITES
    outcomes = sweep(asked.only or list(SETTINGS), [*suites, *asked.tests], asked.jobs, asked.logs)
    print(summary(outcomes))
    return 0 if all(outcome.green for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
