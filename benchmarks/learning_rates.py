"""Sweep of learning rates for the models of ``linattn compare``: every mixer at every rate, with several seeds.

``python -m benchmarks.learning_rates`` writes ``results/learning-rates.json`` after every run and continues an earlier sweep. Sizes, data
and schedule are the defaults of ``linattn compare``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import RESULTS, positive
from linattn.arguments import check_distinct
from linattn.compare.options import CompareOptions
from linattn.compare.text import sizes, train_options
from linattn.data import corpus
from linattn.report.folder import write_text
from linattn.report.machine import machine
from linattn.train import train

RATES = "0.004,0.008,0.002,0.016"


def run(options: CompareOptions, mixer: str, rate: float, seed: int, ffn_dim: int) -> dict[str, Any]:
    """Train ``mixer`` once; the row of the results."""
    with TemporaryDirectory() as folder:
        chosen = train_options(options, mixer, ffn_dim, rate, seed, Path(folder) / "run")
        done = train(replace(chosen, eval_every=options.steps))
    return {
        "mixer": mixer, "learning_rate": rate, "seed": seed, "validation_bits_per_byte": done.validation_bits_per_byte,
        "parameters": done.parameters,
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    default = CompareOptions()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning_rates", description=__doc__.split("\n")[0])
    parser.add_argument("--mixers", default=",".join(default.mixers), help="as in linattn compare")
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--seeds", type=positive, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "learning-rates.json")
    asked = parser.parse_args(arguments)
    options = CompareOptions(mixers=tuple(asked.mixers.split(",")))
    check_distinct("mixers", options.mixers)
    text = corpus(())
    body: dict[str, Any] = {
        "schema": "linattn.learning_rates", "version": 1, "command": "python -m benchmarks.learning_rates",
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "corpus_sha256": text.sha256,
        "steps": options.steps, "dim": options.dim, "layers": options.layers, "batch_size": options.batch_size,
        "train_context": options.train_context, "rows": [],
    }  # fmt: skip
    if asked.out.exists():
        body["rows"] = json.loads(asked.out.read_text(encoding="utf-8"))["rows"]
    known = {(row["mixer"], row["learning_rate"], row["seed"]) for row in body["rows"]}
    widths = sizes(options, text.vocab_size)
    for seed in range(asked.seeds):
        for rate in map(float, asked.rates.split(",")):
            for mixer in options.mixers:
                if (mixer, rate, seed) not in known:
                    body["rows"].append(run(options, mixer, rate, seed, widths[mixer].ffn_dim))
                    write_text(asked.out, json.dumps(body, indent=1, allow_nan=False) + "\n")
                    print(body["rows"][-1], flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
