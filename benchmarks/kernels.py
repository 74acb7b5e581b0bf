"""Benchmark of single kernels: time of each launch of a forward and backward pass, in order.

``python -m benchmarks.kernels`` needs an NVIDIA GPU. Times are medians over passes, by torch's profiler.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, destination, positive
from linattn.bench.gpu import measure
from linattn.bench.gpu.cases import FAMILIES, PASSES, SHAPES, Case, Shape, tensors
from linattn.bench.gpu.libraries import ours

KEY = ("family", "shape", "decay", "decay_dtype")


def launches(case: Case, passes: int) -> list[dict[str, Any]]:
    """Name and microseconds of each launch of ``case``."""
    from torch.profiler import ProfilerActivity, profile

    step = measure._step(ours, tensors(case, "cuda", 0), case.mode)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as log:
        for _ in range(passes):
            step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    events = sorted((e for e in log.events() if e.device_type == cuda and e.device_time > 0), key=lambda e: e.time_range.start)
    count = len(events) // passes
    times = [[events[turn * count + i].device_time for turn in range(passes)] for i in range(count)]
    return [{"kernel": events[i].name, "us": round(statistics.median(us), 1)} for i, us in enumerate(times)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--families", nargs="+", choices=list(FAMILIES), default=["head", "channel", "delta", "gated_delta", "kda", "erase"]
    )
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=list(SHAPES[:2]))
    parser.add_argument("--passes", type=positive, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for kernels-CARD.json")
    options = parser.parse_args(arguments)
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    facts, path = destination(parser, "kernels", "cuda", options.out)
    with Record(path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.kernels", arguments or sys.argv[1:])
        for family in options.families:
            for shape in options.shapes:
                case = Case.of(family, shape, PASSES[1])
                found = launches(case, options.passes)
                sizes = {"shape": str(shape), "decay": case.decay, "decay_dtype": case.decay_dtype}
                record.add({"family": family, **sizes, "us": round(sum(x["us"] for x in found), 1), "launches": found})
                print(f"{case}: " + ", ".join(f"{x['kernel']} {x['us']:.0f}" for x in found), flush=True)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
