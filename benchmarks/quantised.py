"""Benchmark of decoding with quantised weights: ``python -m benchmarks.quantised``, captured steps of one row in turns.

For each mixer a model with random weights in bfloat16, the same in int8 and in int4. Every round times each of them once; the ratios are of
medians over the rounds. ``bound`` is the ratio of the bytes of weights and states that a step reads and writes. Rows are kept as they come.

``--llama-cpp`` alternates with llama.cpp instead, on models that it supports (mamba2 and rwkv7 of 24 layers without our feed-forward): the
same weights in int8 and Q8_0, in int4 and Q4_0. llama.cpp runs in a process of its own, with a pause after each turn, and our step takes as
long as alone. Stopping that process by a signal instead made llama.cpp up to four times slower in its next turn. These models are not
those of the other table: mamba2 has twice the layers, and states of 19 MB.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, destination, llama_cpp
from linattn.bench import decode
from linattn.bench.decode import SIZES, Row, Size
from linattn.ops.cpu import library

KEY = ("what", "model", "size", "device", "threads", "to", "group", "head")
RUNS = 32  # steps of a turn
MIXERS = ("gla", "gated_deltanet", "mamba2")


# Models as llama.cpp has them: the shapes of mamba2-130m and of a RWKV-7 of its size.
PEERS: dict[str, dict[str, Any]] = {
    "mamba2": {"mixer": "mamba2", "layers": 24, "ffn": "none", "tie_embeddings": True},
    "rwkv7": {
        "mixer": "rwkv7, rwkv_channel", "layers": 24, "ffn": "none", "norm": "layer", "embedding_norm": True,
        "mixer_options": {"rwkv_channel": {"hidden": 3072, "gated": False}},
    },
}  # fmt: skip


def build(model: str, size: Size, device: str, **options: Any) -> Any:
    """Build a model with random weights in bfloat16."""
    import linattn

    torch.manual_seed(0)
    given = {"vocab_size": size.vocab_size, "dim": size.dim, "layers": size.layers, "mixer": model, "ffn_dim": size.ffn_dim, **options}
    with torch.device(device):
        model = linattn.LanguageModel(linattn.models.LMConfig(**given))
    return model.bfloat16().eval()


def steps_of(model: Any, groups: tuple[int, ...]) -> dict[tuple[str, int | None, str], tuple[int, Any]]:
    """Bytes of weights read per token, and the captured step, of each format of the layers, its group, and of the head."""
    import linattn

    models: dict[tuple[str, int | None, str], Any] = {
        ("bfloat16", None, "bfloat16"): model,
        ("int8", None, "int8"): linattn.quantize(model, to="int8"),
    }
    models |= {("int4", g, head): linattn.quantize(model, to="int4", group=g, head=head) for g in groups for head in ("int8", "int4")}
    return {key: (bytes_read(one), captured_step(one)) for key, one in models.items()}


def bytes_read(model: Any) -> int:
    """Bytes of weights read per token: all, but only a row of an untied embedding."""
    kept = {t.data_ptr(): t.nbytes for t in model.state_dict().values()}
    table = sum(t.nbytes for t in model.model.embedding.state_dict().values())
    return sum(kept.values()) - (0 if model.config.tie_embeddings else table)


def captured_step(model: Any) -> Any:
    """Captured step of one row of ``model``, ready to run."""
    from linattn.generate import captured, prefill
    from linattn.generate.sampling import greedy

    with torch.inference_mode():
        state = prefill(model.model, torch.randint(model.config.vocab_size, (1, 16), device=model.device))[1]
    step = captured.step_of(model.model, model.lm_head, state, 1 << 20)
    if isinstance(step, str):
        raise RuntimeError(step)
    tokens = torch.zeros(1, dtype=torch.int64, device=model.device)
    step.load(step, state, tokens, tokens.bool(), captured.Choice(greedy, "greedy"))
    return step


def timed(step: Any, device: str, runs: int) -> float:
    """Milliseconds of a step, over ``runs`` of them."""
    decode.wait(device)
    start = time.perf_counter()
    for _ in range(runs):
        step.run()
    decode.wait(device)
    return (time.perf_counter() - start) / runs * 1e3


def rounds(steps: dict[Any, tuple[int, Any]], count: int, device: str, runs: int = RUNS) -> dict[Any, float]:
    """Milliseconds of each step: medians over ``count`` rounds of ``runs`` steps each, after a warm-up round."""
    times: dict[Any, list[float]] = {key: [] for key in steps}
    for _ in range(count + 1):
        for key, (_, step) in steps.items():
            times[key].append(timed(step, device, runs))
    return {key: statistics.median(each[1:]) for key, each in times.items()}


def measure(mixer: str, size: Size, device: str, groups: tuple[int, ...], count: int, profiled: bool) -> list[Row]:
    """Rows of one mixer."""
    steps = steps_of(build(mixer, size, device), groups)
    medians, speed = rounds(steps, count, device), decode.bandwidth(device)
    if profiled and device == "cpu":
        for key, (_, step) in steps.items():
            print(key, *profile(step._program.steps), sep="\n  ", flush=True)
    key = "bfloat16", None, "bfloat16"
    plain, (read, step) = medians[key], steps[key]
    states = 2 * step.buffers.nbytes  # read and written once, in float32 whatever the weights are in
    return [
        {"what": "step", "model": mixer, "size": size.name, "device": device, "threads": torch.get_num_threads(), "to": to, "group": group,
         "head": head, "weights_bytes": steps[to, group, head][0], "states_bytes": states, "bandwidth": speed, "step_ms": ms,
         "ratio": plain / ms,
         "of_bandwidth": steps[to, group, head][0] / speed * 1e3 / ms, "bound": (read + states) / (steps[to, group, head][0] + states)}
        for (to, group, head), ms in medians.items()
    ]  # fmt: skip


def beside_llama_cpp(family: str, size: Size, count: int, runs: int = RUNS) -> Iterator[Row]:
    """Rows of a model with the same weights here and in llama.cpp, alternating, with equally many threads."""
    import linattn
    from linattn.hf.gguf.write import export_gguf

    model, threads = build(family, size, "cpu", **PEERS[family]), torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        for to, group, theirs in (("int8", None, "Q8_0"), ("int4", 32, "Q4_0")):
            small, file = linattn.quantize(model, to=to, group=group or 64), Path(folder) / f"{theirs}.gguf"
            export_gguf(small if to == "int4" else model, file, dtype=theirs)
            step, ours, other = captured_step(small), [], []
            with llama_cpp.Decoder(file, threads) as decoder:
                for _ in range(count + 1):
                    ours.append(timed(step, "cpu", runs))
                    time.sleep(0.05)  # threads of either side have stopped polling for work
                    other.append(decoder.milliseconds(runs))
                    time.sleep(0.05)
            ms, their_ms = statistics.median(ours[1:]), statistics.median(other[1:])
            yield {
                "what": "llama.cpp", "model": family, "size": size.name, "device": "cpu", "threads": threads, "to": to, "group": group,
                "head": "int8", "gguf": theirs,
                "gguf_bytes": file.stat().st_size, "weights_bytes": bytes_read(small), "step_ms": ms, "theirs_ms": their_ms,
                "ratio": their_ms / ms,
            }  # fmt: skip


@torch.inference_mode()
def profile(calls: list[Any], runs: int = 20) -> list[str]:
    """Number, microseconds, bytes and bytes a second of a step's calls by kernel and shape; the least time of each call over ``runs``."""
    least = [float("inf")] * len(calls)
    for _ in range(runs):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            least[i] = min(least[i], time.perf_counter() - start)
    parts: dict[str, list[float]] = {}
    for call, seconds in zip(calls, least, strict=True):
        name, size = _part(call)
        part = parts.setdefault(name, [0, 0.0, 0])
        part[:] = part[0] + 1, part[1] + seconds * 1e6, part[2] + size
    return [
        f"{count:4} x {us / count:8.1f} us = {us:9.1f} us, {size / count / 1e3:8.0f} kB, {size / us / 1e3:5.1f} GB/s  {name}"
        for name, (count, us, size) in sorted(parts.items(), key=lambda part: -part[1][1])
    ]


def _part(call: Any) -> tuple[str, int]:
    """Name of a call's kernel with the shapes of its matrices, and their bytes; without shapes and bytes for other calls than products."""
    if not isinstance(call, library.Bound):
        return getattr(call, "__name__", str(getattr(call, "func", call))[:40]), 0
    name, inside = call.kernel.__name__, call.kept[1]
    maps = inside[-1][0] if "linears" in name and isinstance(inside[-1], tuple) else []
    shapes = [f"{rows} x {inside[0].shape[-1]} of {bits or 8 * matrix.itemsize} bits" for matrix, _, _, rows, _, _, _, bits, *_ in maps]
    size = sum(t.nbytes for matrix, *_, scale, _ in maps for t in (matrix, scale) if isinstance(t, torch.Tensor))
    return " ".join([name, ", ".join(shapes)]).strip(), size


def line(row: Row) -> str:
    """Format a row."""
    if row["what"] == "llama.cpp":
        theirs = f"llama.cpp {row['gguf']} {row['theirs_ms']:.3f} ms: {row['ratio']:.2f} x"
        return f"{row['model']:15} {row['to']} {row['step_ms']:.3f} ms, {theirs}"
    read = f"{row['weights_bytes'] / 1e6:.0f} MB at {row['of_bandwidth']:.0%} of {row['bandwidth'] / 1e9:.1f} GB/s"
    what = f"{row['model']:15} {row['to']:8} {row['group'] or '':3} head {row['head']:8}"
    return f"{what} {row['step_ms']:.3f} ms, {row['ratio']:.2f} x bfloat16, {read}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="130M")
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--groups", default="64")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--llama-cpp", action="store_true", help="beside llama.cpp, on a CPU")
    parser.add_argument("--profile", action="store_true", help="print what a step's time goes to, on a CPU")
    parser.add_argument("--quick", action="store_true", help="tiny models, nothing kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for quantised-MACHINE.json")
    options = parser.parse_args(arguments)
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    facts, path = destination(parser, "quantised", options.device, options.out)
    size, groups = SIZES["tiny" if options.quick else options.size], tuple(int(g) for g in options.groups.split(","))
    with Record(None if options.quick else path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.quantised", arguments or sys.argv[1:])
        count = 3 if options.quick else options.rounds
        for mixer in options.mixers.split(","):
            if options.llama_cpp:
                rows: Iterable[Row] = beside_llama_cpp(mixer, size, count)
            else:
                rows = measure(mixer, size, options.device, groups, count, options.profile)
            for row in rows:
                record.add(row)
                print(line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
