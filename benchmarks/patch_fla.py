"""Program ``python -m benchmarks.patch_fla``: fla's own models in training, with its ops and under ``linattn.patch_fla``, in one process.

For each model the losses of the same first steps both ways, milliseconds of alternating whole steps, and profiled milliseconds of the
kernels that differ, the ops'. bfloat16, AdamW, random tokens; refusals of fla on this machine are recorded as rows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, allow_refused, destination
from linattn.bench.gpu import libraries, timing
from linattn.bench.gpu.measure import quick_tuning

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("GLA", {"num_heads": 8, "expand_k": 1.0}),
    "kda": ("KDA", {"num_heads": 8, "head_dim": 128}),
    "delta_net": ("DeltaNet", {"num_heads": 8}),
    "gated_deltanet": ("GatedDeltaNet", {"num_heads": 8, "head_dim": 128, "expand_v": 1.0}),
}
KEY = ("model", "ops")
STEPS, TURNS = 6, 5


def build(name: str, layers: int) -> torch.nn.Module:
    from fla import models

    kind, options = MODELS[name]
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": layers, "vocab_size": 32000, "use_cache": False}
    return getattr(models, f"{kind}ForCausalLM")(getattr(models, f"{kind}Config")(**sizes, **options))


class Training:
    """One model, its optimizer and its batches, with fla's ops or ours."""

    def __init__(self, name: str, patched: bool, given: argparse.Namespace) -> None:
        self.patched = patched
        torch.manual_seed(0)
        self.model = build(name, given.layers).to("cuda", torch.bfloat16).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        make = torch.Generator("cuda").manual_seed(1)
        shape = (given.batch, given.tokens)
        self.batches = [torch.randint(32000, shape, generator=make, device="cuda") for _ in range(STEPS)]
        self.count = 0

    def step(self) -> torch.Tensor:
        ids = self.batches[self.count % STEPS]
        self.count += 1
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self, count: int) -> tuple[list[float], list[torch.Tensor]]:
        """Milliseconds and losses of ``count`` steps."""
        from linattn import patch_fla

        losses: list[torch.Tensor] = []
        with patch_fla() if self.patched else nullcontext():
            times = timing._events([lambda: losses.append(self.step())], count)
        return times, losses

    def kernels(self) -> dict[str, float]:
        """Milliseconds of each kernel in a step, by name."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as log:
            self.run(2)
        cuda = torch.autograd.DeviceType.CUDA
        return {e.key: e.self_device_time_total / 2e3 for e in log.key_averages() if e.device_type == cuda}


def measured(name: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    ways = {"fla": Training(name, False, given), "linattn": Training(name, True, given)}
    rows = {way: {"model": name, "ops": way, "layers": given.layers, "batch": given.batch, "tokens": given.tokens} for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for way, training in list(ways.items()):
        try:
            rows[way]["losses"] = [round(loss.item(), 5) for loss in training.run(STEPS)[1]]
        except Exception as error:  # refusals of fla are results
            rows[way] |= {"failure": type(error).__name__, "message": str(error)[:300]}
            del ways[way]
    for _ in range(TURNS):
        for way, training in ways.items():
            times[way] += training.run(4)[0][1:]
    kernels = {way: training.kernels() for way, training in ways.items()}
    for way in ways:
        others = set().union(*(kernels[other] for other in ways if other != way))
        rows[way]["ops_ms"] = sum(ms for kernel, ms in kernels[way].items() if kernel not in others)
        ms = statistics.median(times[way])
        rows[way] |= {"step_ms": ms, "tokens_per_second": given.batch * given.tokens / ms * 1e3}
    return list(rows.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.patch_fla", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--refused", action="store_true", help="also time the pass of fla that it refuses here for its results")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for patch-fla-CARD.json")
    given = parser.parse_args(arguments)
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    found = libraries.find("fla", "cuda", libraries.FLA_MODELS)
    if isinstance(found, str):
        parser.error(found)
    version, folders = found
    sys.path[:0] = folders
    quick_tuning()
    if given.refused:
        allow_refused()
    facts, path = destination(parser, "patch-fla", "cuda", given.out)
    with Record(path, KEY, {**facts, "fla": version}) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.patch_fla", arguments or sys.argv[1:])
        for name in given.models:
            for row in measured(name, given):
                record.add(row)
                print(row, flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
