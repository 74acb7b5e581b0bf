"""Benefit of the calibration in a small model on a CPU: ``python -m benchmarks.convert_calibration``.

The teacher of :mod:`benchmarks.convert_stages` is converted by only a first stage, without calibration for some steps, and with it for
a third of them. Writes results/convert-calibration-cpu.json; takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.convert_stages import CONTEXT, ROWS, teacher
from linattn.bench.files import command
from linattn.distill import convert
from linattn.report.folder import write_text
from linattn.report.machine import machine

MIXER, STEPS = "gated_deltanet", 30  # without calibration


def main(arguments: list[str] | None = None) -> int:
    """Train the teacher, convert, and write a row for each seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert_calibration", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "convert-calibration-cpu.json")
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args(arguments)
    date = datetime.now(UTC).date().isoformat()
    about, rows = {"command": command("python -m benchmarks.convert_calibration", sys.argv[1:]), "date": date, **machine()}, []
    with tempfile.TemporaryDirectory() as folder:
        run, text = teacher(Path(folder))
        for seed in range(asked.seeds):
            row: dict[str, object] = {"mixer": MIXER, "steps": STEPS, "seed": seed}
            for name, calibrate, count in (("calibrated", True, STEPS // 3), ("not calibrated", False, STEPS)):
                options = {"mixer": MIXER, "text": text, "context": CONTEXT, "batch_size": ROWS, "seed": seed, "calibrate": calibrate}
                tokens, out = count * CONTEXT * ROWS, Path(folder) / f"{seed}-{calibrate}"
                result = convert(run, out=out, tokens1=tokens, tokens2=0, save_every=count, progress=False, **options)
                row[name] = [{key: record[key] for key in ("stage", "tokens", "kl")} for record in result.history]
            rows.append(row)
            print(row, flush=True)
    write_text(asked.out, json.dumps({"schema": "linattn.calibration", "run": about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
