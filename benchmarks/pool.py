"""Benchmark of the pool of states: rows that join and leave at random against the fixed batch of a captured step.

``python -m benchmarks.pool`` runs on a GPU if there is one: 256 rows of the 340M models, ``--rows 256 --sizes 340M --new 512``.
The queue is never empty, so that every slot is taken. Prompts and numbers of new tokens are uniform, from 1 to twice their mean.
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
KEY = ("mixer", "size", "dtype", "rows", "prompt", "new")


def load(pool: Pool, vocabulary: int, prompt: int, new: int) -> Iterator[tuple[Request, int]]:
    """Yield tokens of ``pool`` for ever, with a queue that is never empty; means of ``prompt`` and ``new`` tokens."""
    draw = random.Random(0)  # noqa: S311

    def submit() -> None:
        ids = [draw.randrange(vocabulary) for _ in range(draw.randrange(1, 2 * prompt))]
        pool.submit(ids, max_new_tokens=draw.randrange(1, 2 * new))

    for _ in range(pool.free + WAITING):
        submit()
    for request, token in pool.run():
        yield request, token
        if request.done:
            submit()


def measure(model: Any, rows: int, prompt: int, new: int, seconds: float) -> dict[str, float]:
    """Tokens a second of a pool of ``rows`` slots, and percentiles of the time between two tokens of one sequence, in ms."""
    pool = Pool(model, slots=rows, context=2 * (prompt + new))
    tokens, last, gaps, count = load(pool, model.config.vocab_size, prompt, new), {}, [], 0
    while pool.free or not all(len(r.tokens) for r in pool._active):  # filled, and all steps captured
        next(tokens)
    for _ in range(4 * rows):
        next(tokens)
    decode.wait(model.device.type)
    start = time.perf_counter()
    while (now := time.perf_counter()) < start + seconds:
        request, _ = next(tokens)
        count += 1
        if id(request) in last and len(request.tokens) > 1:
            gaps.append(now - last[id(request)])
        last[id(request)] = now
    decode.wait(model.device.type)
    rate = count / (time.perf_counter() - start)
    quantiles = torch.tensor(gaps).quantile(torch.tensor([0.5, 0.99])) * 1e3
    return {"tokens_per_s": rate, "p50_ms": quantiles[0].item(), "p99_ms": quantiles[1].item()}


def compare(mixer: str, size: decode.Size, options: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Both ways for one model and number of rows."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = decode.build(mixer, size, options.device, dtype)
    ms, _, step = decode.step_ms(model, decode.after(model, rows, options.prompt), 20)
    del step
    fixed, pooled = rows / ms * 1e3, measure(model, rows, options.prompt, options.new, options.seconds)
    row = {"mixer": mixer, "size": size.name, "dtype": str(dtype).removeprefix("torch."), "rows": rows}
    row |= {"prompt": options.prompt, "new": options.new, "fixed_tokens_per_s": fixed, **pooled}
    return row | {"share": pooled["tokens_per_s"] / fixed}


def line(row: dict[str, Any]) -> str:
    rates = f"fixed {row['fixed_tokens_per_s']:,.0f} tokens/s, pool {row['tokens_per_s']:,.0f} ({row['share']:.0%})"
    gaps = f"between tokens p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms"
    return f"{row['mixer']:15} {row['size']:5} {row['rows']:>3} rows: {rates}, {gaps}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default=None, help="340M on a GPU, tiny on a CPU")
    parser.add_argument("--mixers", default="gla,gated_deltanet")
    parser.add_argument("--rows", default=None, help="256 on a GPU, 16 on a CPU")
    parser.add_argument("--prompt", type=positive, default=32, help="tokens of a prompt, on average")
    parser.add_argument("--new", type=positive, default=None, help="new tokens of a request, on average: 512 on a GPU, 64 on a CPU")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
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
