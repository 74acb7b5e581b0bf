"""Fuzzing of all public functions with wrong calls, by Hypothesis: ``python -m benchmarks.fuzz_calls --cases 20000``.

Each must end in a result or in one line that names the argument (:mod:`tests.fuzz`). The calls run in separate processes, so that a
crash is a finding too. Writes the outcomes by function, and every finding; exits with 1 if there is one. A file with the beginning
of the same run is continued.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import positive
from linattn.state import replacing, writable

CHUNK = 2000  # calls of one process
KEPT = 300  # characters of a finding's arguments


def run(cases: int, seed: int) -> dict[str, Any]:
    """Run ``cases`` calls in this process."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from tests.fuzz.calls import calls
    from tests.fuzz.outcome import complaint

    ends: Counter[str] = Counter()
    findings: dict[str, str] = {}

    @seeded(seed)
    @settings(max_examples=cases, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(calls())
    def one(case: tuple[str, Any, dict[str, Any]]) -> None:
        name, call, arguments = case
        with contextlib.redirect_stdout(io.StringIO()):
            end, wrong = complaint(call, arguments)
        ends[f"{name}: {end}"] += 1
        if wrong is not None:
            findings.setdefault(f"{name}: {wrong}", str(arguments)[:KEPT])

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # some calls write to any given name
        one()
    return {"ends": ends, "findings": findings}


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_calls", description=__doc__)
    parser.add_argument("--cases", type=positive, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=positive, default=1, help="processes at a time; the calls are the same")
    parser.add_argument("--out", type=Path, help="the JSON file that is written")
    parser.add_argument("--here", action="store_true", help="in this process; prints the figures as JSON")
    asked = parser.parse_args(args)
    if asked.here:
        print(json.dumps(run(asked.cases, asked.seed)))
        return 0
    out = None if asked.out is None else writable(asked.out)
    log = _begun(out, asked.cases, asked.seed)
    parts = range(log["processes"], -(-asked.cases // CHUNK))
    counts = [min(CHUNK, asked.cases - part * CHUNK) for part in parts]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for told in pool.map(_part, counts, [asked.seed + part for part in parts]):
            _add(log, told)
            if out is not None:
                with replacing(out) as aside:
                    aside.write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    print(f"{log['calls']:,} calls, {log['results']:,} results, {log['refused']:,} refused, {len(log['findings'])} findings")
    return 1 if log["findings"] else 0


def _begun(out: Path | None, cases: int, seed: int) -> dict[str, Any]:
    """Log in ``out`` to continue, if it is of the same calls, or a new one."""
    new = _about(cases, seed)
    if out is not None and out.is_file():
        old = json.loads(out.read_text(encoding="utf-8"))
        if all(old.get(key) == new[key] for key in ("command", "native_isa", "versions")):
            return old
    return new


def _part(count: int, seed: int) -> dict[str, Any]:
    """Make ``count`` calls in a separate process; returns outcomes, findings and seconds."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.fuzz_calls", "--here", "--cases", str(count), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = {"ends": {}, "findings": {f"a process ended with {done.returncode}, seed {seed}": done.stderr[-KEPT:]}}
    else:
        told = json.loads(done.stdout.splitlines()[-1])
    return {**told, "seconds": round(time.perf_counter() - begun)}


def _add(log: dict[str, Any], told: dict[str, Any]) -> None:
    """Add the outcomes of a process to the log."""
    log["findings"] |= told["findings"]
    log["ends"] = dict(sorted((Counter(log["ends"]) + Counter(told["ends"])).items()))
    ends = log["ends"].items()
    log["results"], log["refused"] = (sum(n for end, n in ends if end.endswith(how)) for how in (": result", ": refused"))
    log["calls"], log["processes"] = log["results"] + log["refused"], log["processes"] + 1
    log["seconds"] += told["seconds"]


def _about(cases: int, seed: int) -> dict[str, Any]:
    """Empty log."""
    import hypothesis
    import torch

    import linattn
    from linattn.ops.cpu import library
    from linattn.report.machine import machine

    return {
        "command": f"python -m benchmarks.fuzz_calls --cases {cases} --seed {seed}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "native_isa": None if library.reason() else library.isa(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {
            "linattn": linattn.__version__,
            "torch": torch.__version__,
            "hypothesis": hypothesis.__version__,
            "python": platform.python_version(),
        },
        "processes": 0,
        "calls": 0,
        "results": 0,
        "refused": 0,
        "seconds": 0,
        "findings": {},
        "ends": {},
    }


if __name__ == "__main__":
    sys.exit(main())
