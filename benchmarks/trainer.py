"""Program ``python -m benchmarks.trainer``: tokens per second of ``linattn train --compile`` beside ``linattn bench train`` on a GPU.

The same model, batch and context. The trainer reads Python's standard library, tokenised to the benchmark's vocabulary; its speed is the
median of its logs, without the interval with compilation. The programs alternate.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, destination, positive
from benchmarks.losses import logs_of
from benchmarks.texts import learn
from linattn.bench.files import command
from linattn.bench.gpu import train as bench
from linattn.bench.gpu.record import Record
from linattn.bench.gpu.worker import Failure, Worker

KEY = ("model", "program", "turn")
RATE = 1e-4  # learning rate of the benchmark
LIMIT = 900.0  # seconds of a program


def tokenizer(folder: Path, vocabulary: int) -> Path:
    """Byte-pair encoding of ``vocabulary`` tokens, trained on the text that ``linattn train`` reads by default."""
    with (folder / "sample.jsonl").open("w", encoding="utf-8") as out:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
            out.write(json.dumps({"text": path.read_text(encoding="utf-8", errors="ignore")}) + "\n")
    learn(folder, vocabulary)
    return folder / "tokenizer.json"


def arguments(model: str, size: bench.Size, file: Path, steps: int) -> list[str]:
    """Command line of the trainer for the benchmark's ``model``."""
    options = {
        "mixer": model, "dim": size.dim, "layers": size.layers, "ffn-dim": size.ffn_dim, "context": size.tokens, "batch-size": size.batch,
        "tokenizer": file, "learning-rate": RATE, "steps": steps, "eval-every": steps, "eval-tokens": size.tokens,
    }  # fmt: skip
    mixer = [f"--mixer-option={model}.{name}={value}" for name, value in bench.OPTIONS.get(model, {}).items()]
    return ["train", "--compile", *(f"--{name}={value}" for name, value in options.items()), *mixer]


def trained(given: list[str], size: bench.Size, steps: int) -> dict[str, Any]:
    """Run ``linattn train`` and read its logs."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "linattn", *given, "--out", f"{folder}/run"]
        done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=LIMIT)
        if done.returncode:
            return {"failure": (done.stderr or done.stdout).strip().rsplit("\n", 1)[-1][:300], "tokens_per_second": None}
        logs = logs_of(Path(folder) / "run")
    speed = logs["tokens_per_second"]
    row = {"tokens_per_second": speed, "step_ms": 1e3 * size.batch * size.tokens / speed, "steps": steps}
    return row | {"peak_gb": logs["memory_gb"] * 1e9 / 2**30, "losses": logs["train"]}


def benchmarked(model: str, size: bench.Size) -> dict[str, Any]:
    """Run the benchmark's compiled model."""
    with Worker() as worker:
        try:
            row = worker.call(bench.train, "linattn", model, True, size, "cuda", timeout=LIMIT)
        except Failure as failure:
            return {"failure": str(failure)[:300], "tokens_per_second": None}
    return {name: row[name] for name in ("tokens_per_second", "step_ms", "steps", "peak_gb", "first_step_s", "parameters")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=bench.MODELS["linattn"], default=["gla", "gated_deltanet"])
    parser.add_argument("--turns", type=positive, default=1)
    parser.add_argument("--steps", type=positive, default=50, help="of the trainer; the benchmark does 20")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for trainer-CARD.json")
    options = parser.parse_args()
    facts, path = destination(parser, "trainer", "cuda", options.out)
    size = bench.Size(steps=20)
    with tempfile.TemporaryDirectory() as folder, Record(path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.trainer", sys.argv[1:])
        file = tokenizer(Path(folder), size.vocab_size)
        for model in options.models:
            given = arguments(model, size, file, options.steps)
            shown = shlex.join(["linattn", *arguments(model, size, Path(file.name), options.steps)])
            speeds: dict[str, list[float]] = {}
            for turn in range(options.turns):
                for program in ("linattn bench train", shown):
                    row = trained(given, size, options.steps) if program == shown else benchmarked(model, size)
                    record.add({"model": model, "program": program, "turn": turn, **row})
                    record.write()
                    print(f"{program}: {row['tokens_per_second']} tokens/s {row.get('failure', '')}", flush=True)
                    speeds.setdefault(program, []).append(row["tokens_per_second"] or 0.0)
            base, own = (statistics.median(each) for each in speeds.values())
            print(f"{model}: the trainer has {own / base:.1%} of the benchmark's tokens/s", flush=True)


if __name__ == "__main__":
    main()
