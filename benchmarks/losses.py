"""Train six models with ``linattn train`` on the same tokens of one GPU, and keep their logs: validation loss by tokens and seconds.

    python -m benchmarks.texts texts
    linattn data prepare texts/prose.txt texts/code.txt --tokenizer tokenizer.json --out tokens
    python -m benchmarks.losses --data tokens

First every model trains shortly at each of ``--rates``, ``--jobs`` at a time; then each trains at its best one, alone on the machine. All
have the parameters of the first: the widths of their feed-forwards differ. Results are written after every training to
results/losses-CARD.json; a program that is started again continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, destination, positive
from linattn.data.codec import TokenizerCodec
from linattn.data.shards import TOKENIZER
from linattn.experiment.sizing import Size, equal_sizes, parameters
from linattn.hf import LMConfig
from linattn.models import LanguageModel
from linattn.report.folder import write_text

MIXERS = {
    "softmax": "softmax", "gla": "gla", "gated_deltanet": "gated_deltanet", "mamba2": "mamba2", "rwkv7": "rwkv7",
    "hybrid": "gated_deltanet*3, softmax",
}  # fmt: skip
CONTEXT = 2048
MULTIPLE = 32  # of feed-forward widths: others are slow on a GPU


def widths(asked: argparse.Namespace, vocab_size: int) -> dict[str, Size]:
    """Feed-forward widths at which the models have about the parameters of the first."""

    def count(name: str, ffn_dim: int | None) -> int:
        config = LMConfig(vocab_size=vocab_size, dim=asked.dim, layers=asked.layers, mixer=MIXERS[name], ffn_dim=ffn_dim)
        return parameters(lambda: LanguageModel(config))

    sizes = equal_sizes(asked.models, count(asked.models[0], None), count)
    rounded = {name: MULTIPLE * round(size.ffn_dim / MULTIPLE) for name, size in sizes.items()}
    return {name: Size(width, count(name, width)) for name, width in rounded.items()}


def train(asked: argparse.Namespace, name: str, rate: float, steps: int, ffn_dim: int) -> dict[str, Any]:
    """Train ``name`` in a process of its own; the row of the results, with ``linattn train``'s log or the end of its error."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "mixer": MIXERS[name], "data": asked.data, "dim": asked.dim, "layers": asked.layers, "ffn-dim": ffn_dim, "context": CONTEXT,
            "batch-size": asked.batch_size, "learning-rate": rate, "steps": steps,
            "eval-every": max(10, steps // 10), "out": f"{folder}/run",
        }  # fmt: skip
        command = [sys.executable, "-m", "linattn", "train", *(f"--{option}={value}" for option, value in options.items())]
        command += [f"--device={asked.device}"] + ["--compile"] * asked.compile
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log = Path(folder, "run", "metrics.jsonl")
        history = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        states = sorted(Path(folder).glob("run/checkpoint-*/trainer_state.json"))
        speeds = [row["tokens_per_second"] for path in states[-1:] for row in json.loads(path.read_text())["log_history"] if "loss" in row]
    row = {"model": name, "learning_rate": rate, "steps": steps, "ffn_dim": ffn_dim, "history": history}
    if done.returncode:
        return {**row, "failure": done.stderr.strip().rsplit("\n", 1)[-1][:300]}
    return {**row, "tokens_per_second": statistics.median(speeds) if speeds else None}


def last(row: dict[str, Any]) -> float:
    """Final validation bits per byte; infinite after a failure."""
    return float("inf") if "failure" in row else row["history"][-1]["validation_bits_per_byte"]


def main(arguments: list[str] | None = None) -> int:
    """Sweep, train, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="a folder of linattn data prepare")
    parser.add_argument("--models", default=",".join(MIXERS), help=f"of {', '.join(MIXERS)}")
    parser.add_argument("--rates", default="0.001,0.002,0.004")
    parser.add_argument("--sweep-steps", type=positive, default=100)
    parser.add_argument("--steps", type=positive, default=600)
    parser.add_argument("--jobs", type=positive, default=3, help="trainings of the sweep at a time")
    parser.add_argument("--dim", type=positive, default=512)
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--batch-size", type=positive, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    asked.models = asked.models.split(",")
    facts, path = destination(parser, "losses", asked.device, asked.out)
    sized = widths(asked, TokenizerCodec(Path(asked.data, TOKENIZER)).vocab_size)
    body: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"schema": "linattn.losses", "card": facts["card"], "rows": []}
    )
    body |= {
        "run": facts, "command": f"python -m benchmarks.losses {' '.join(arguments or sys.argv[1:])}", "context": CONTEXT,
        "batch_size": asked.batch_size, "dim": asked.dim, "layers": asked.layers,
        "parameters": {name: size.parameters for name, size in sized.items()},
    }  # fmt: skip
    known = {(row["model"], row["learning_rate"], row["steps"]): row for row in body["rows"]}

    def run(name: str, rate: float, steps: int) -> dict[str, Any]:
        key = (name, rate, steps)
        if key not in known:
            known[key] = train(asked, name, rate, steps, sized[name].ffn_dim)
            body["rows"] = list(known.values())
            write_text(path, json.dumps(body, indent=1) + "\n")
            row = known[key]
            print(
                f"{name}, rate {rate}, {steps} steps: {row.get('failure') or last(row)}, {row.get('tokens_per_second')} tokens/s",
                flush=True,
            )
        return known[key]

    rates = [float(text) for text in asked.rates.split(",")]
    with ThreadPoolExecutor(asked.jobs) as pool:
        swept = list(pool.map(lambda pair: run(*pair, asked.sweep_steps), [(name, rate) for rate in rates for name in asked.models]))
    for name in asked.models:
        best = min((row for row in swept if row["model"] == name), key=last)
        run(name, best["learning_rate"], asked.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
