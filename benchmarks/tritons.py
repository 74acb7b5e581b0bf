"""Kernels under the installed triton, or the first on PYTHONPATH: correctness, speed, and compiled resources.

``python -m benchmarks.tritons``, on a GPU: every rule and rank of decays against the reference, and timed. ``--compile``, without one:
registers and spilled bytes of Hopper's kernels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import RESULTS

KINDS, RANKS = ("plain", "bonus", "beta", "erase"), ("none", "BTH", "BTHK")


def compiled(kind: str, rank: str) -> list[dict[str, Any]]:
    """Resources of each kernel of a forward and a backward pass on a multiprocessor (K = V = 128, bfloat16)."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.triton.compiling", kind, rank, "bfloat16", "gluon"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind}, {rank}: {done.stderr[-2000:]}")
    return [{"family": f"{kind} {rank}", **kernel} for kernel in json.loads(done.stdout)]


def run(kind: str, rank: str) -> list[dict[str, Any]]:
    """Run a case: the worst error over its bound with its result or gradient, and the time of both passes if it is recorded."""
    from benchmarks.configurations.calls import Chunks
    from linattn.bench.gpu import timing

    rows = []
    for size in (64, 128):
        call = Chunks(kind, rank, "bfloat16", size)
        ratios = call.ratios()
        worst = max(ratios, key=ratios.__getitem__)
        row = {"family": f"{kind} {rank}", "size": size, "of": worst, "error_over_bound": round(ratios[worst], 2)}
        rows.append(row | ({"ms": round(timing.milliseconds([call.step()], "cuda", 1.0), 3)} if call.timed else {}))
    return rows


def about() -> dict[str, Any]:
    """Versions, and kernels disabled on this machine."""
    import torch
    import triton

    from linattn.ops import gpu
    from linattn.ops.triton import hopper, launch

    facts: dict[str, Any] = {"triton": triton.__version__, "torch": torch.__version__}
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        facts |= {"card": torch.cuda.get_device_name(device), "replay_refusal": launch.replay_refusal(device)}
        facts |= {"gluon_refusal": hopper.gluon_refusal(device)} if gpu.capability(device) == (9, 0) else {}
    return facts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tritons", description=__doc__.split("\n")[0])
    parser.add_argument("--compile", action="store_true", help="compile for a Hopper, which takes no GPU")
    parser.add_argument("--families", default="", help="some, as 'erase BTHK,beta none'; else all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for tritons-VERSION.json or tritons-compiled-VERSION.json")
    options = parser.parse_args(arguments)
    import torch

    from linattn.bench.files import command

    if not (options.compile or torch.cuda.is_available()):
        parser.exit(2, f"{parser.prog} needs an NVIDIA GPU, and torch sees none; --compile does not\n")
    known = list(product(KINDS, RANKS))
    wanted = [tuple(name.split()) for name in options.families.split(",") if name]
    if unknown := [name for name in wanted if name not in known]:
        parser.exit(2, f"{parser.prog}: --families has {unknown[0]}, which is not among {', '.join(map(' '.join, known))}\n")
    facts, rows = about(), []
    told = command(parser.prog, arguments or sys.argv[1:])
    path = options.out / f"tritons-{'compiled-' if options.compile else ''}{facts['triton']}.json"
    for kind, rank in wanted or known:
        rows += (compiled if options.compile else run)(kind, rank)
        print(f"{kind} {rank}", flush=True)
        body = {"schema": "linattn.tritons", "command": told, **facts, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")  # after each, so that an interrupted run keeps its results
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
