"""Benchmark of decoding with quantised weights: ``python -m benchmarks.quantised``, captured steps of one row in turns.

For each mixer a model with random weights in bfloat16, the same in int8 and in int4. Every round times each of them once; the ratios are of
medians over the rounds. Rows are kept as they come.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, destination
from linattn.bench import decode
from linattn.bench.decode import SIZES, Row, Size

KEY = ("model", "size", "device", "threads", "to", "group")
MIXERS = ("gla", "gated_deltanet", "mamba2")


def build(mixer: str, size: Size, device: str) -> Any:
    """Build a model with random weights in bfloat16."""
    import linattn

    torch.manual_seed(0)
    config = linattn.models.LMConfig(vocab_size=size.vocab_size, dim=size.dim, layers=size.layers, mixer=mixer, ffn_dim=size.ffn_dim)
    return linattn.LanguageModel(config).bfloat16().eval().to(device)


def steps_of(mixer: str, size: Size, device: str, groups: tuple[int, ...]) -> dict[tuple[str, int | None], tuple[int, Any]]:
    """Bytes of weights that a token reads, and the captured step, of each format."""
    import linattn
    from linattn.generate import captured, prefill

    model = build(mixer, size, device)
    models = {("bfloat16", None): model, ("int8", None): linattn.quantize(model, to="int8")}
    models |= {("int4", group): linattn.quantize(model, to="int4", group=group) for group in groups}
    found = {}
    for key, one in models.items():
        with torch.inference_mode():
            state = prefill(one.model, torch.randint(size.vocab_size, (1, 16), device=device))[1]
        step = captured.step_of(one.model, one.lm_head, state, 1 << 20)
        if isinstance(step, str):
            raise RuntimeError(step)
        tokens = torch.zeros(1, dtype=torch.int64, device=device)
        step.load(step, state, tokens, tokens.bool(), captured.Choice(decode.greedy, "greedy"))
        lookup = sum(t.nbytes for t in one.model.embedding.state_dict().values())
        found[key] = sum(t.nbytes for t in one.state_dict().values()) - lookup, step
    return found


def rounds(steps: dict[Any, tuple[int, Any]], count: int, device: str, runs: int = 8) -> dict[Any, float]:
    """Milliseconds of each step: medians over ``count`` rounds of ``runs`` steps each."""
    times: dict[Any, list[float]] = {key: [] for key in steps}
    for _ in range(count):
        for key, (_, step) in steps.items():
            decode.wait(device)
            start = time.perf_counter()
            for _ in range(runs):
                step.run()
            decode.wait(device)
            times[key].append((time.perf_counter() - start) / runs * 1e3)
    return {key: statistics.median(each[1:]) for key, each in times.items()}


def measure(mixer: str, size: Size, device: str, groups: tuple[int, ...], count: int, profiled: bool) -> list[Row]:
    """Rows of one mixer."""
    steps = steps_of(mixer, size, device, groups)
    medians, speed = rounds(steps, count, device), decode.bandwidth(device)
    if profiled and device == "cpu":
        for key, (_, step) in steps.items():
            print(key, *profile(step._program.steps), sep="\n  ", flush=True)
    plain = medians["bfloat16", None]
    return [
        {"model": mixer, "size": size.name, "device": device, "threads": torch.get_num_threads(), "to": to, "group": group,
         "weights_bytes": steps[to, group][0], "bandwidth": speed, "step_ms": ms, "ratio": plain / ms,
         "of_bandwidth": steps[to, group][0] / speed * 1e3 / ms}
        for (to, group), ms in medians.items()
    ]  # fmt: skip


@torch.inference_mode()
def profile(calls: list[Any], runs: int = 20) -> list[str]:
    """Microseconds of a step's calls by kind, the longest first."""
    total: Counter[str] = Counter()
    for _ in range(runs):
        for call in calls:
            start = time.perf_counter()
            call()
            total[_kind(call)] += (time.perf_counter() - start) / runs * 1e6
    return [f"{us:8.1f} us  {kind}" for kind, us in total.most_common(9)]


def _kind(call: Any) -> str:
    kept = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)) if hasattr(call, "__code__") else {}
    inside = kept.get("function") or kept.get("target")
    return str(inside.cell_contents if inside is not None else getattr(call, "func", call))[:90]


def line(row: Row) -> str:
    """Format a row."""
    read = f"{row['weights_bytes'] / 1e6:.0f} MB at {row['of_bandwidth']:.0%} of {row['bandwidth'] / 1e9:.1f} GB/s"
    return f"{row['model']:15} {row['to']:8} {row['group'] or '':3} {row['step_ms']:.3f} ms, {row['ratio']:.2f} x bfloat16, {read}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantised", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="130M")
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--groups", default="64")
    parser.add_argument("--rounds", type=int, default=40)
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
        for mixer in options.mixers.split(","):
            for row in measure(mixer, size, options.device, groups, 3 if options.quick else options.rounds, options.profile):
                record.add(row)
                print(line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
