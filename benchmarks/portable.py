"""Program ``python -m benchmarks.portable``: the kernels for all GPUs on this one, with those for Hopper switched off, as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

import torch
import triton

from linattn.bench.gpu import measure
from linattn.bench.gpu.cases import FIRST_SHAPE, PASSES, SHAPES, Case
from linattn.ops.triton import hopper

FAMILIES = ("none", "head", "channel", "rwkv6", "delta", "gated_delta", "kda", "erase")
STRONG = (-0.7, -3.0)  # mean decays of trained models


def cases(families: list[str]) -> list[Case]:
    """Both passes of every family over one long sequence and eight short ones, and training with strong decays per channel."""
    usual = [Case.of(family, shape, mode) for family in families for shape in SHAPES[:2] for mode in PASSES]
    channel = [family for family in ("channel", "kda") if family in families]
    return usual + [replace(Case.of(family, FIRST_SHAPE, PASSES[1]), decay=mean) for family in channel for mean in STRONG]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.portable", description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--seconds", type=float, default=0.4, help="how long each case is timed")
    given = parser.parse_args(arguments)
    hopper._hopper = lambda device: False
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}))
    for case in cases(given.families):
        figure = measure.measure("linattn", case, "cuda", given.seconds, check=False)
        print(json.dumps({"case": str(case), **{name: round(value, 4) for name, value in figure.items() if value is not None}}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
