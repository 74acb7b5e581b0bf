"""Seconds to the first forward and backward pass in a fresh process, with an empty compiler cache and again with that cache.

``python -m benchmarks.cold_start``: each family alone, then all in one process. The clock starts after Python, torch and the
CUDA context, and includes importing linattn and triton, compiling and loading kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import RESULTS, destination

# The rule and the rank of decays (tests/ops/cases.py), and the aim in seconds with an empty cache.
FAMILIES = {
    "linear": ("plain", "none", 10),
    "retnet": ("plain", "H", 10),
    "mamba2": ("plain", "BTH", 10),
    "gla": ("plain", "BTHK", 10),
    "rwkv6": ("bonus", "BTHK", 10),
    "deltanet": ("beta", "none", 20),
    "gated delta": ("beta", "BTH", 20),
    "kda": ("beta", "BTHK", 20),
    "rwkv7": ("erase", "BTHK", 20),
}
ALL, ALL_AIM, WARM_AIM = "all of them", 60, 2


def measure(names: list[str], device: str) -> float:
    """Measure seconds of one forward and backward pass of each, in this process."""
    import torch

    from tests.ops import cases

    small = device == "cpu"
    if small:
        from tests.ops.triton import interpreter  # noqa: F401
    sizes = dict(T=40, K=8, V=8) if small else dict(T=4096, K=128, V=128)
    dtype = torch.float32 if small else torch.bfloat16
    calls = [cases.make(*FAMILIES[name][:2], B=1, H=2, **sizes).to(dtype) for name in names]
    leaves = [{n: t.to(device).requires_grad_() for n, t in call.tensors.items()} for call in calls]
    start = time.perf_counter()
    for call, tensors in zip(calls, leaves, strict=True):
        out = call.with_(**tensors)(backend="triton")
        sum(t.float().sum() for t in out.values()).backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def fresh(names: list[str], device: str, cache: str) -> float:
    """Run :func:`measure` in a process of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", "benchmarks.cold_start", "--device", device, "--only", ",".join(names)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{names}: {done.stderr[-2000:]}")
    return float(done.stdout.strip().splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_start", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--families", default=",".join(FAMILIES), help="some of them, or empty for all in one process alone")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for cold-start-CARD.json")
    options = parser.parse_args(arguments)
    if options.only:
        print(measure(options.only.split(","), options.device))
        return 0
    from linattn.bench.files import command

    alone = [name for name in options.families.split(",") if name]
    if unknown := [name for name in alone if name not in FAMILIES]:
        parser.exit(2, f"{parser.prog}: --families must be among {', '.join(FAMILIES)}, but has {', '.join(unknown)}\n")
    machine, path = destination(parser, "cold-start", options.device, options.out)
    rows = []
    for name in [*alone, ALL]:
        names = list(FAMILIES) if name == ALL else [name]
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (fresh(names, options.device, cache) for _ in range(2))
        aim = ALL_AIM if name == ALL else FAMILIES[name][2]
        rows.append({"family": name, "cold_s": round(cold, 2), "warm_s": round(warm, 2), "cold_aim_s": aim, "warm_aim_s": WARM_AIM})
        print(f"{name:12} empty cache {cold:6.1f} s (aim {aim}), with it {warm:5.2f} s (aim {WARM_AIM})", flush=True)
    told = command(parser.prog, arguments or sys.argv[1:])
    body = {"schema": "linattn.cold_start", "command": told, **machine, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
