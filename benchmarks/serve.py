"""Load test of vLLM's endpoint for a model of this library, beside vLLM's own Mamba-2 and transformers' generate on the same machine.

``.venv-serve/bin/python -m benchmarks.serve`` writes benchmarks/results/serve.json. Clients ask again as soon as they are answered; every
request has as many prompt tokens and new tokens, in streams, so that the time to the first token and between tokens is the client's.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor

from benchmarks import RESULTS, positive
from linattn.data.codec import ByteCodec
from linattn.hf import LinattnForCausalLM, LMConfig, export
from linattn.hf.tokenizer import tokenizer_of
from linattn.vllm.server import Server, serving

VOCABULARY = 256


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
    """Figures of transformers' own loop, one request after the other: what serves without an engine."""
    gate = threading.Lock()

    def ask(n: int) -> list[float]:
        begun = time.perf_counter()
        with gate:
            ids = torch.tensor([[random.Random(n).randrange(1, VOCABULARY) for _ in range(load.prompt)]])  # noqa: S311
            clock = Clock()
            lm.generate(ids, max_new_tokens=load.new, do_sample=False, eos_token_id=None, pad_token_id=0, logits_processor=[clock])
        return [begun, *clock.times]

    return _measured(ask, load)


class Clock(LogitsProcessor):
    """Times of the tokens of a generation."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


def _measured(ask: Callable[[int], list[float]], load: Load) -> dict[str, float]:
    with ThreadPoolExecutor(load.clients) as pool:
        list(pool.map(ask, range(-load.clients, 0)))  # everything is compiled and allocated
        begun = time.perf_counter()
        stamps = list(pool.map(ask, range(load.requests)))
        return figures(stamps, time.perf_counter() - begun)


def rows(mixer: str, dim: int, layers: int, load: Load, folder: Path) -> list[dict[str, Any]]:
    """Figures of one model in each way."""
    lm, found = model(mixer, dim, layers), []
    found.append(("transformers' generate", through_transformers(lm, load)))
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
                found.append((name, through_server(server, load)))
        except RuntimeError as error:
            found.append((name, {"error": str(error)}))
    return [{"mixer": mixer, "dim": dim, "layers": layers, "way": name, **asdict(load), **result} for name, result in found]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixers", default="gated_deltanet,mamba2")
    for name, default in {"dim": 256, "layers": 6, "clients": 8, "requests": 64, "prompt": 128, "new": 64}.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS / "serve.json")
    given = parser.parse_args()
    load = Load(given.clients, given.requests, given.prompt, given.new)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for mixer in given.mixers.split(","):
            found += rows(mixer, given.dim, given.layers, load, Path(folder))
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    given.out.write_text(json.dumps({"machine": machine, "rows": found}, indent=1) + "\n")
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
