"""Train six models at two sizes with ``linattn train`` on the same tokens, and keep their logs: loss by tokens, seconds and parameters.

    python -m benchmarks.texts texts
    linattn data prepare texts/sample.jsonl --tokenizer texts/tokenizer.json --end "<|end|>" --out tokens
    python -m benchmarks.losses --data tokens --work runs

At the first width every model trains shortly at each of ``--rates``, ``--jobs`` at a time, and at half or twice of them while its best one
is the lowest or highest. Then each trains at its best one, alone on the GPU, the largest and slowest first; at a larger width at that rate
times the ratio of the widths. All models of a width have the parameters of the first one: the widths of their feed-forwards differ. Results
are written after every training to results/losses-CARD.json. After ``--seconds`` a running training saves a checkpoint, and the same
command continues it. Several of these programs, each with a GPU, can share a folder of runs and a file of results.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, destination, positive
from linattn.data.codec import TokenizerCodec
from linattn.data.shards import INDEX, SPLITS, TOKENIZER
from linattn.experiment.sizing import equal_sizes, parameters
from linattn.hf import LMConfig
from linattn.models import LanguageModel
from linattn.report.folder import write_text
from linattn.state import read_json

MIXERS = {
    "softmax": "softmax", "gla": "gla", "gated_deltanet": "gated_deltanet", "mamba2": "mamba2", "rwkv7": "rwkv7",
    "hybrid": "gated_deltanet*3, softmax",
}  # fmt: skip
HEAD = 128  # channels of a head of mixers whose number of heads is set here
MULTIPLE = 32  # of feed-forward widths: others are slow on a GPU
SPARE = 20.0  # seconds for a checkpoint
LEAST = 40.0  # minimum of seconds left to start a training
MOST = 9  # largest number of learning rates per model


@dataclass(frozen=True)
class Training:
    """One training of a model."""

    model: str
    dim: int
    learning_rate: float
    steps: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.model}-{self.dim}-{self.learning_rate:g}-{self.steps}"


class Losses:
    """All trainings, their results on disk, and the choice of the next one."""

    def __init__(self, asked: argparse.Namespace, path: Path, head: dict[str, Any], start: Any) -> None:
        """``start`` makes a process from ``target`` and ``args``."""
        self.asked, self.path, self.head, self.start = asked, path, head, start
        self.ends = time.monotonic() + asked.seconds
        self.vocab_size = TokenizerCodec(Path(asked.data, TOKENIZER)).vocab_size

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Finished trainings by name."""
        return {row["name"]: row for row in read_json(self.path)["rows"]} if self.path.exists() else {}

    def swept(self, model: str) -> list[Training]:
        """Short trainings of ``model``: at the given rates, then beyond them until the best is not an extreme one."""
        rows, rates = self.rows, sorted(self.asked.rates)

        def made(rate: float) -> Training:
            return Training(model, self.asked.dims[0], rate, self.asked.sweep_steps)

        while len(rates) < MOST and all(made(rate).name in rows for rate in rates):
            losses = {rate: last(rows[made(rate).name]) for rate in rates}
            best = min(losses, key=losses.__getitem__)
            if losses[best] == float("inf"):
                break
            if best == rates[0]:
                rates.insert(0, best / 2)
            elif best == rates[-1]:
                rates.append(best * 2)
            else:
                break
        return [made(rate) for rate in rates]

    def best(self, model: str) -> float | None:
        """Learning rate with the lowest loss; None before all short trainings of ``model`` are finished."""
        rows, swept = self.rows, self.swept(model)
        if any(t.name not in rows for t in swept):
            return None
        return min(swept, key=lambda t: last(rows[t.name])).learning_rate

    def long(self) -> list[Training]:
        """Long trainings that can start, the largest and slowest first, so that several programs end at about the same time."""
        best = {model: self.best(model) for model in self.asked.models}
        first, rows = self.asked.dims[0], self.rows
        speeds = {m: max(rows[t.name].get("tokens_per_second") or 0 for t in self.swept(m)) for m, rate in best.items() if rate is not None}
        return [
            Training(model, dim, rate * first / dim, self.asked.steps)
            for dim in sorted(self.asked.dims, reverse=True)
            for model in sorted(speeds, key=speeds.__getitem__)
            if (rate := best[model]) is not None
        ]

    @cache  # noqa: B019  one object a program
    def width(self, model: str, dim: int) -> int:
        """Feed-forward width of ``model``."""

        def count(name: str, ffn_dim: int | None) -> int:
            return parameters(lambda: LanguageModel(self.config(name, dim, ffn_dim)))

        models = list(dict.fromkeys([self.asked.models[0], model]))
        found = equal_sizes(models, count(models[0], None), count)[model].ffn_dim
        return MULTIPLE * round(found / MULTIPLE)

    def config(self, model: str, dim: int, ffn_dim: int | None) -> LMConfig:
        """Configuration of ``model``."""
        return LMConfig(
            vocab_size=self.vocab_size, dim=dim, layers=self.asked.layers, mixer=MIXERS[model], ffn_dim=ffn_dim,
            mixer_options={name: {"heads": n} for name, n in heads(model, dim).items()},
        )  # fmt: skip

    def run(self, training: Training) -> bool:
        """Train unless another program does, and add the result to the file; True if it has been added."""
        with claimed(self.asked.work / f"{training.name}.lock") as free:
            if not free or not self.time_left or training.name in self.rows:
                return False
            row = self.trained(training)
            if row is None:
                return False
            with claimed(self.asked.work / "results.lock", wait=True):
                rows = [*self.rows.values(), row]
                write_text(self.path, json.dumps({**self.head, "rows": rows}, indent=1) + "\n")
            print(f"{training.name}: {row.get('failure') or last(row)}, {row.get('tokens_per_second')} tokens/s", flush=True)
            return True

    def trained(self, t: Training) -> dict[str, Any] | None:
        """Result of a training; None if it has been interrupted."""
        width, folder = self.width(t.model, t.dim), self.asked.work / t.name
        options = {
            "mixer": MIXERS[t.model], "data": self.asked.data, "dim": t.dim, "layers": self.asked.layers, "ffn-dim": width,
            "context": self.asked.context, "batch-size": self.asked.batch_size, "learning-rate": t.learning_rate, "steps": t.steps,
            "eval-every": max(1, t.steps // (20 if t.steps == self.asked.steps else 1)), "eval-tokens": self.asked.eval_tokens,
            "warmup": self.asked.warmup, "out": folder, **({} if self.asked.device == "cuda" else {"device": self.asked.device}),
        }  # fmt: skip
        arguments = ["train", "--join-documents", *(f"--{name}={value}" for name, value in options.items())]
        arguments += [f"--mixer-option={name}.heads={n}" for name, n in heads(t.model, t.dim).items()]
        arguments += ["--compile"] * self.asked.compile + ["--resume"] * (folder / "run.json").exists()
        log = self.asked.work / f"{t.name}.log"
        process = self.start(target=linattn, args=(arguments, log))
        process.start()
        process.join(None if self.ends == float("inf") else max(1.0, self.ends - SPARE - time.monotonic()))
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGTERM)
            process.join()
            return None
        size = parameters(lambda: LanguageModel(self.config(t.model, t.dim, width)))
        row = {"name": t.name, **vars(t), "ffn_dim": width, "parameters": size, "card": self.head["card"]}
        if process.exitcode:
            shutil.rmtree(folder, ignore_errors=True)
            return {**row, "failure": log.read_text().strip().rsplit("\n", 1)[-1][:300]}
        row |= logs_of(folder)
        shutil.rmtree(folder)
        return row

    @property
    def time_left(self) -> bool:
        """True if a training can start."""
        return time.monotonic() < self.ends - LEAST

    def all(self) -> bool:
        """Run what is left; True if everything has finished."""
        while self.time_left:
            rows = self.rows
            rounds = zip_longest(*map(self.swept, self.asked.models))  # different models concurrently: later ones find theirs compiled
            short = [t for each in rounds for t in each if t is not None and t.name not in rows]
            left = [] if self.asked.sweep_only else [t for t in self.long() if t.name not in rows]
            if not short and not left:
                return True
            with ThreadPoolExecutor(self.asked.jobs) as pool:
                done = any(list(pool.map(self.run, short)))
            if not done and not any(self.run(training) for training in left):  # one, then the choice is made again
                time.sleep(1)  # other programs run the rest
        return False


def heads(model: str, dim: int) -> dict[str, int]:
    """Heads by mixer, where they do not follow from ``dim``."""
    return {name: dim // HEAD for name in ("softmax", "gated_deltanet") if name in MIXERS[model] and dim >= HEAD}


def linattn(arguments: list[str], log: Path) -> None:
    """Run the command line in this process; target of the server's processes, which have imported it already."""
    from linattn.cli.main import main

    with log.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        sys.exit(main(arguments))


def logs_of(folder: Path) -> dict[str, Any]:
    """What ``linattn train`` has logged: validations, training losses, and the median speed without the interval that compiles."""
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (state,) = folder.glob(f"checkpoint-{history[-1]['step']}/trainer_state.json")
    logs = [row for row in read_json(state)["log_history"] if "loss" in row]
    found: dict[str, Any] = {"history": history, "train": [[row["step"], round(row["loss"], 4)] for row in logs]}
    for name in ("tokens_per_second", "memory_gb", "mfu"):
        values = [row[name] for row in logs[1:] or logs if name in row]
        found[name] = statistics.median(values) if values else None
    return found


def last(row: dict[str, Any]) -> float:
    """Final validation bits per byte; infinite after a failure."""
    return float("inf") if "failure" in row else row["history"][-1]["validation_bits_per_byte"]


@contextmanager
def claimed(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold a lock that ends with this program; False if another one has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def options(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser.add_argument("--data", required=True, type=Path, help="a folder of linattn data prepare")
    parser.add_argument("--work", required=True, type=Path, help="a folder for the runs")
    parser.add_argument("--models", default=list(MIXERS), type=lambda text: text.split(","), help=f"of {', '.join(MIXERS)}")
    parser.add_argument("--dims", default=[512, 1024], type=lambda text: [int(n) for n in text.split(",")], help="widths of the models")
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--rates", default=[0.0005, 0.001, 0.002], type=lambda text: [float(n) for n in text.split(",")])
    parser.add_argument("--sweep-steps", type=positive, default=300)
    parser.add_argument("--steps", type=positive, default=1200)
    parser.add_argument("--warmup", type=positive, default=60, help="steps in which the learning rate rises, short trainings included")
    parser.add_argument("--batch-size", type=positive, default=16)
    parser.add_argument("--context", type=positive, default=2048)
    parser.add_argument("--eval-tokens", type=positive, default=1 << 17)
    parser.add_argument("--jobs", type=positive, default=3, help="trainings of the sweep at a time")
    parser.add_argument("--sweep-only", action="store_true", help="only the short trainings")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which running trainings save and end")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def command(arguments: list[str]) -> str:
    """Command line of this program with the documentation's paths in place of this machine's."""
    kept, rest = ["python -m benchmarks.losses --data tokens --work runs"], iter(arguments)
    for argument in rest:
        if argument in ("--data", "--work", "--out", "--seconds"):
            next(rest, None)
        elif argument != "--sweep-only":
            kept.append(argument)
    return " ".join(kept)


def about(asked: argparse.Namespace, facts: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Head of the results: machine, command, and size and digest of the data."""
    index = read_json(asked.data / INDEX)
    data = {f"{split}_tokens": sum(shard["tokens"] for shard in index["splits"][split]) for split in SPLITS}
    data |= {f"{split}_bytes": sum(shard["bytes"] for shard in index["splits"][split]) for split in SPLITS}
    return {
        "schema": "linattn.losses", "card": facts["card"], "run": facts, "command": command(arguments),
        "date": datetime.now(UTC).date().isoformat(),
        "data": {**data, "vocabulary": index["vocab_size"], "sha256": index["sha256"]},
        **{name: getattr(asked, name) for name in ("context", "batch_size", "layers", "dims", "rates", "steps", "sweep_steps", "warmup")},
        "mixers": {name: MIXERS[name] for name in asked.models},
    }  # fmt: skip


def allocate(device: str) -> None:
    """Use ``device``."""
    torch.zeros(1, device=device)


def processes(device: str) -> Any:
    """Start processes from a server that has imported everything, or new ones if those cannot use the GPU."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the default check initialises CUDA, which prevents forks
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["linattn.cli.main", "linattn.cli.train", "linattn.train.training", "torch._dynamo"])
    probe = server.Process(target=allocate, args=(device,))
    probe.start()
    probe.join()
    if probe.exitcode:
        print("each training imports everything again: CUDA is initialised in the server", flush=True)
    return multiprocessing.get_context("spawn") if probe.exitcode else server


def main(arguments: list[str] | None = None) -> int:
    """Sweep, train, write; 3 if time was up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.losses", description=__doc__.split("\n")[0])
    asked = options(parser, arguments)
    facts, path = destination(parser, "losses", asked.device, asked.out)
    asked.work.mkdir(parents=True, exist_ok=True)
    head = about(asked, facts, list(arguments if arguments is not None else sys.argv[1:]))
    return 0 if Losses(asked, path, head, processes(asked.device).Process).all() else 3


if __name__ == "__main__":
    raise SystemExit(main())
