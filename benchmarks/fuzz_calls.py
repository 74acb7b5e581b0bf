"""Random wrong calls of everything public, by Hypothesis: ``python -m benchmarks.fuzz_calls --cases 20000``.

Each has to end in a result or in one line of ours that names the argument (:mod:`tests.fuzz`). The calls run in processes of their own,
so that a crash is a finding, too. Writes how many calls of each function ended how, and every finding; exits with 1 where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import subprocess
import sys
import time
import warnings
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import positive
from linattn.state import writable

CHUNK = 2000  # calls of one process
KEPT = 300  # characters of a finding's arguments


def run(cases: int, seed: int) -> dict[str, Any]:
    """``cases`` calls in this process."""
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
    one()
    return {"ends": ends, "findings": findings}


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz_calls", description=__doc__)
    parser.add_argument("--cases", type=positive, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the JSON file that is written")
    parser.add_argument("--here", action="store_true", help="in this process; prints the figures as JSON")
    asked = parser.parse_args(args)
    if asked.here:
        print(json.dumps(run(asked.cases, asked.seed)))
        return 0
    out = None if asked.out is None else writable(asked.out)
    ends: Counter[str] = Counter()
    findings: dict[str, str] = {}
    begun = time.perf_counter()
    for part, start in enumerate(range(0, asked.cases, CHUNK)):
        count, seed = min(CHUNK, asked.cases - start), asked.seed + part
        command = [sys.executable, "-m", "benchmarks.fuzz_calls", "--here", "--cases", str(count), "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            findings[f"a process ended with {done.returncode}, seed {seed}"] = done.stderr[-KEPT:]
            continue
        told = json.loads(done.stdout.splitlines()[-1])
        ends.update(told["ends"])
        findings |= told["findings"]
    log = _log(asked.cases, asked.seed, ends, findings) | {"seconds": round(time.perf_counter() - begun)}
    text = json.dumps(log, indent=1)
    print(text if out is None else f"{sum(ends.values()):,} calls, {len(findings)} findings")
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    return 1 if findings else 0


def _log(cases: int, seed: int, ends: Counter[str], findings: dict[str, str]) -> dict[str, Any]:
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
        "calls": sum(ends.values()),
        "results": sum(n for end, n in ends.items() if end.endswith(": result")),
        "refused": sum(n for end, n in ends.items() if end.endswith(": refused")),
        "findings": findings,
        "ends": dict(sorted(ends.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
