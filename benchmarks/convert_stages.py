"""Benefit of the first stage in a small model on a CPU, in results/convert-stages-cpu.json: ``python -m benchmarks.convert_stages``.

A softmax model of 4 layers of width 64 learns 2 MiB of Python's standard library for 200 steps of 8 x 64 bytes and is converted to
``gated_deltanet*3, softmax`` with equal tokens in two ways: half of the steps in each stage, or all in the second. Takes some 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import RESULTS
from linattn.bench.files import command
from linattn.data import sources
from linattn.distill import convert
from linattn.report.folder import write_text
from linattn.report.machine import machine
from linattn.train import TrainOptions, train

CONTEXT, ROWS = 64, 8
TEACHER = {"dim": 64, "layers": 4, "context": CONTEXT, "batch_size": ROWS, "steps": 200, "learning_rate": 6e-3}
CASES = [(20, r) for r in (1.6e-3, 3.6e-3)] + [(steps, r) for steps in (40, 200) for r in (6.4e-4, 1.6e-3, 3.6e-3)] + [(80, 3.6e-3)]


def teacher(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Train the teacher in ``folder``; returns its run and the text."""
    text = folder / "text.txt"
    text.write_bytes(b"\n".join(sources.standard_library())[: 1 << 21])
    run = train(TrainOptions(mixer="softmax", text=(str(text),), out=folder / "teacher", **TEACHER), progress=False).run
    return run, (str(text),)


def main(arguments: list[str] | None = None) -> int:
    """Train the teacher, convert, and write a row for each budget and learning rate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert_stages", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "convert-stages-cpu.json")
    asked = parser.parse_args(arguments)
    date = datetime.now(UTC).date().isoformat()
    about, rows = {"command": command("python -m benchmarks.convert_stages", sys.argv[1:]), "date": date, **machine()}, []
    with tempfile.TemporaryDirectory() as folder:
        run, text = teacher(Path(folder))
        for steps, rate in CASES:
            row: dict[str, object] = {"steps": steps, "rate2": rate}
            for name, first in (("both", steps // 2), ("second alone", 0)):
                tokens = [n * CONTEXT * ROWS for n in (first, steps - first)]
                out = Path(folder) / f"{steps}-{rate}-{first}"
                options = {
                    "mixer": "gated_deltanet*3, softmax",
                    "text": text,
                    "context": CONTEXT,
                    "batch_size": ROWS,
                    "rate2": rate,
                }
                result = convert(run, out=out, tokens1=tokens[0], tokens2=tokens[1], save_every=steps, progress=False, **options)
                row[name] = [{key: record[key] for key in ("stage", "kl")} for record in result.history]
            rows.append(row)
            print(row, flush=True)
            body = {"schema": "linattn.stages", "run": about, "rows": rows}
            write_text(asked.out, json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
