"""Benchmark of the pool of states: rows that join and leave at random against the fixed batch of a captured step.

``python -m benchmarks.pool`` runs on a GPU if there is one: 256 rows of the 340M models, ``--rows 256 --sizes 340M --new 512``.
Prompts and numbers of new tokens are uniform, from 1 to twice their mean. First the queue is never empty, so that every slot is taken;
then requests arrive at random times (a Poisson process), at the share ``--load`` of the tokens a second measured first.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, destination, positive
from linattn.bench import decode
from linattn.generate import Pool, Request

WAITING = 64  # requests in the queue
KEY = ("mixer", "size", "dtype", "rows", "prompt", "new", "defer")


class Load:
    """Requests for a pool of ``rows`` slots, with ``prompt`` and ``new`` tokens on average."""

    def __init__(self, model: Any, rows: int, prompt: int, new: int, defer: bool) -> None:
        self.pool, self._device = Pool(model, slots=rows, context=2 * (prompt + new), defer=defer), model.device.type
        self._vocabulary, self._prompt, self._new = model.config.vocab_size, prompt, new
        self._draw = random.Random(0)  # noqa: S311
        self._requests: list[Request] = []

    def submit(self) -> None:
        ids = [self._draw.randrange(self._vocabulary) for _ in range(self._draw.randrange(1, 2 * self._prompt))]
        self._requests.append(self.pool.submit(ids, max_new_tokens=self._draw.randrange(1, 2 * self._new)))

    def full(self) -> Iterator[tuple[Request, int]]:
        """Yield tokens forever, with a queue that is never empty."""
        for _ in range(self.pool.free + WAITING):
            self.submit()
        for request, token in self.pool.run():
            yield request, token
            if request.done:
                self.submit()

    def arriving(self, rate: float) -> Iterator[tuple[Request, int]]:
        """Yield tokens forever of decoding requests and of new ones that arrive at random times, ``rate`` tokens a second in total."""
        for request in self._requests:
            if not request.tokens:
                self.pool.cancel(request)
        due, each = time.perf_counter(), self._new / rate  # seconds between requests
        while True:
            self.submit()  # also if all have ended
            for request, token in self.pool.run():
                yield request, token
                while due < time.perf_counter():
                    self.submit()
                    due += self._draw.expovariate(1 / each)

    def measure(self, tokens: Iterator[tuple[Request, int]], seconds: float) -> dict[str, float]:
        """Tokens a second, and percentiles of the time between two tokens of one sequence, in ms."""
        last: dict[Request, float] = {}
        count, gaps = 0, []
        decode.wait(self._device)
        start = time.perf_counter()
        while (now := time.perf_counter()) < start + seconds:
            request, _ = next(tokens)
            count += 1
            if request in last:
                gaps.append(now - last[request])
            last[request] = now
        decode.wait(self._device)
        rate = count / (time.perf_counter() - start)
        quantiles = torch.tensor(gaps).quantile(torch.tensor([0.5, 0.99])) * 1e3
        return {"tokens_per_s": rate, "p50_ms": quantiles[0].item(), "p99_ms": quantiles[1].item()}


def pooled(model: Any, rows: int, options: argparse.Namespace) -> dict[str, float]:
    """Figures of a pool of ``rows`` slots: with a queue that is never empty, and at ``options.load``."""
    load = Load(model, rows, options.prompt, options.new, options.defer)
    tokens = load.full()
    for _ in range(64 * rows):  # until all slots are taken, and steps captured
        next(tokens)
    load.measure(tokens, options.warmup)
    found = load.measure(tokens, options.seconds)
    tokens = load.arriving(options.load * found["tokens_per_s"])
    load.measure(tokens, options.warmup)
    return found | {f"loaded_{name}": value for name, value in load.measure(tokens, options.seconds).items()} | {"load": options.load}


def compare(mixer: str, size: decode.Size, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Measure both ways for one model and number of rows."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = decode.build(mixer, size, options.device, dtype)
    ms, _, step = decode.step_ms(model, decode.after(model, rows, options.prompt), 20)
    del step
    fixed, found = rows / ms * 1e3, pooled(model, rows, options)
    row = {"mixer": mixer, "size": size.name, "dtype": str(dtype).removeprefix("torch."), "rows": rows}
    row |= {"prompt": options.prompt, "new": options.new, "defer": options.defer, "fixed_tokens_per_s": fixed, **found}
    return row | {"share": found["tokens_per_s"] / fixed}


def line(row: dict[str, Any]) -> str:
    rates = f"fixed {row['fixed_tokens_per_s']:,.0f} tokens/s, pool {row['tokens_per_s']:,.0f} ({row['share']:.0%})"
    gaps = f"between tokens p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms"
    loaded = f"at a load of {row['load']:.0%} p50 {row['loaded_p50_ms']:.2f} ms, p99 {row['loaded_p99_ms']:.2f} ms"
    return f"{row['mixer']:15} {row['size']:5} {row['rows']:>3} rows: {rates}, {gaps}; {loaded}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default=None, help="340M on a GPU, tiny on a CPU")
    parser.add_argument("--mixers", default="gla,gated_deltanet")
    parser.add_argument("--rows", default=None, help="256 on a GPU, 16 on a CPU")
    parser.add_argument("--prompt", type=positive, default=32, help="tokens of a prompt, on average")
    parser.add_argument("--new", type=positive, default=None, help="new tokens of a request, on average: 512 on a GPU, 64 on a CPU")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--warmup", type=float, default=4.0, help="seconds before each, until requests end as often as they come")
    parser.add_argument("--load", type=float, default=0.8, help="share of the tokens a second, for the times between tokens")
    parser.add_argument("--defer", action="store_true", help="write states only every few steps")
    parser.add_argument("--quick", action="store_true", help="nothing kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for pool-CARD.json")
    options = parser.parse_args(arguments)
    gpu = options.device == "cuda"
    options.new = options.new or (512 if gpu else 64)
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    facts, path = destination(parser, "pool", options.device, options.out)
    with Record(None if options.quick else path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.pool", arguments or sys.argv[1:])
        for mixer in options.mixers.split(","):
            for size in (options.sizes or ("340M" if gpu else "tiny")).split(","):
                for rows in (options.rows or ("256" if gpu else "16")).split(","):
                    row = compare(mixer, decode.SIZES[size], options, int(rows))
                    record.add(row)
                    print(line(row), flush=True)
    print("nothing kept" if options.quick else path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
