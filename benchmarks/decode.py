"""Benchmark of decoding, ours captured and all libraries' through ``generate``: ``python -m benchmarks.decode``, on a GPU if there is one.

Times first, ours before others', then the captured step's tokens and states against the uncaptured model's. Rows are
kept as they come.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, destination
from linattn.bench import decode
from linattn.bench.decode import SIZES, Row
from linattn.generate import captured

OURS = ("gla", "gated_deltanet")
FAR = 1 << 20  # tokens of context actually read, in one row
TIMEOUT = 120.0
KEY = ("what", "library", "model", "size", "dtype", "rows", "context")


def attempt(function: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Any]:
    """Return the result of ``function``; an exception is printed, and the run continues."""
    try:
        yield function(*arguments, **options)
    except Exception:  # a failing row must not end the others
        traceback.print_exc()


def check(device: str, quick: bool) -> Iterator[Row]:
    for mixer in (*OURS, "mamba2", "kda", "rwkv7"):
        for dtype in (torch.float32, torch.bfloat16):
            for rows in (1, 3, 64) if device == "cuda" else (1, 3):
                size = SIZES["tiny" if quick or mixer not in OURS else "130M"]
                yield from attempt(decode.same, mixer, device, dtype, size, rows, 16)


def gpu(names: tuple[str, ...], mixers: tuple[str, ...], rows: tuple[int, ...], profiled: bool) -> Iterator[Row]:
    """Measure our models, each after 1,024 tokens, and one row after a million."""
    speed = decode.bandwidth("cuda")
    print(f"memory: {speed / 1e12:.2f} TB/s", flush=True)
    for name in names:
        for mixer in mixers:
            model = decode.build(mixer, SIZES[name], "cuda", torch.bfloat16)
            far = [(1, FAR)] if 1 in rows and (name == names[0] or mixer == "gla") else []
            for count, context in [*((n, 1024) for n in rows), *far]:
                yield from attempt(decode.ours, mixer, SIZES[name], count, context, speed, 100, model=model)
                if profiled and context == 1024:
                    for lines in attempt(decode.kernels, model, count):
                        print(*lines, sep="\n", flush=True)
            del model
            torch.cuda.empty_cache()


def gpu_peers(names: tuple[str, ...], rows: tuple[int, ...]) -> Iterator[Row]:
    from linattn.bench.gpu import libraries
    from linattn.bench.gpu.worker import Failure, Worker

    found = libraries.find("fla", "cuda", libraries.FLA_MODELS)
    peers: list[tuple[str, str, list[str]]] = [("transformers", "llama", [])]
    if isinstance(found, str):
        print(f"without fla: {found}", flush=True)
    else:
        peers += [("fla", mixer, found[1]) for mixer in OURS]
    for library, model, folders in peers:
        with Worker(folders) as worker:
            for name in names:
                for count in rows if library == "transformers" else rows[:2]:
                    try:
                        yield worker.call(decode.peer, library, model, name, "cuda", "bfloat16", count, 1024, 16, timeout=TIMEOUT)
                    except Failure as failure:
                        print(f"{library} {model} {name}, {count} rows: {failure.kind} ({str(failure)[:300]})", flush=True)


def cpu(dtypes: tuple[torch.dtype, ...], quick: bool) -> Iterator[Row]:
    """Measure our models after prompts of each length, in turn with transformers' models."""
    size, speed = SIZES["tiny" if quick else "130M"], decode.bandwidth("cpu")
    print(f"memory: {speed / 1e9:.1f} GB/s with {torch.get_num_threads()} threads", flush=True)
    for dtype in dtypes:
        for mixer in OURS:
            model = decode.build(mixer, size, "cpu", dtype)
            for context in (16,) if quick else (16, 2048, 16384):
                yield decode.ours(mixer, size, 1, context, speed, 8 if quick else 24, model=model)
            del model
        for name, contexts in {"llama": (16, 2048), "mamba": (16,), "mamba2": (16,), "rwkv": (16,), "qwen3_next": (16, 2048)}.items():
            for context in contexts[:1] if quick else contexts:
                yield decode.peer("transformers", name, size.name, "cpu", str(dtype).removeprefix("torch."), 1, context, 8)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", default="340M,1.3B", help="on a GPU")
    parser.add_argument("--mixers", default=",".join(OURS), help="our mixers, on a GPU")
    parser.add_argument("--rows", default="1,64,256", help="on a GPU")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="on a CPU")
    parser.add_argument("--no-check", action="store_true", help="times alone")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print what a step launches")
    parser.add_argument("--no-regions", action="store_true", help="on a GPU, without compiling what is left between the kernels")
    parser.add_argument("--quick", action="store_true", help="tiny models, nothing kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for decode-CARD.json")
    options = parser.parse_args(arguments)
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    captured.COMPILES = not options.no_regions
    facts, path = destination(parser, "decode", options.device, options.out)
    with Record(None if options.quick else path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.decode", arguments or sys.argv[1:])
        for row in _times(options):
            record.add({"what": "times", **row})
            print(decode.line(row), flush=True)
        for row in [] if options.no_check else check(options.device, options.quick):
            record.add({"what": "check", **row})
            tokens = f"{row['equal']} of {row['tokens']} tokens equal, {row['near']} as likely"
            what = f"{row['model']:15} {row['dtype']:9} {row['rows']:3} rows"
            print(f"{what}: {tokens}, states to {row['state_error']:.1e} ({row['state']}), {row['how']}", flush=True)
    print("nothing kept" if options.quick else path)
    return 0


def _times(options: argparse.Namespace) -> Iterator[Row]:
    if options.device == "cpu":
        yield from cpu(tuple(getattr(torch, name) for name in options.dtypes.split(",")), options.quick)
        return
    names = ("tiny",) if options.quick else tuple(options.sizes.split(","))
    rows = tuple(int(n) for n in options.rows.split(","))
    yield from gpu(names, tuple(options.mixers.split(",")), rows, options.profile)
    if not options.no_peers:
        yield from gpu_peers(names, rows)


if __name__ == "__main__":
    sys.exit(main())
