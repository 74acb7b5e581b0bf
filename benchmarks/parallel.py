"""Program ``torchrun --nproc-per-node 2 -m benchmarks.parallel``: one sequence on all GPUs against one GPU.

Forward and backward of a decay per channel (GLA), gated delta and KDA, H 16, K and V 128, bfloat16. Process 0 prints each
case and writes it to ``--out``: milliseconds, the efficiency (one card's time / (cards x time on all)) and the memory of a process as a
share of one card's. With ``--library fla``, fla's context parallelism for the delta rules, from unpacked wheels (``LINATTN_WHEELS``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import linattn
from benchmarks import RESULTS, destination
from linattn.bench import wheels
from linattn.bench.files import command
from linattn.bench.gpu import cases, libraries, measure
from linattn.bench.gpu.record import Record
from linattn.parallel import Layout, context_parallel

HEADS, SIZE = 16, 128
LENGTHS = (32_768, 131_072, 1_048_576)
FAMILIES = ("channel", "gated_delta", "kda")
KEY = ("library", "family", "tokens", "cards", "graph")
Call = Callable[[dict[str, Tensor]], Tensor]


def inputs(family: str, tokens: int) -> dict[str, Tensor]:
    """Leaves of a call on ``tokens`` tokens, as in ``linattn bench ops``."""
    made = cases.tensors(cases.Case.of(family, cases.Shape(1, tokens, HEADS, SIZE), "train"), "cuda", 0)
    return {name: t.detach().requires_grad_() for name, t in made.items()}


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """CUDA graph of ``step``, without the host's launches."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads run the collectives
        step()
    return graph.replay


def measured(call: Call, given: dict[str, Tensor], repeats: int, graph: bool) -> tuple[float, int]:
    """Milliseconds of a forward and backward pass, the median of asynchronously queued calls, and peak memory in bytes."""
    weight = torch.randn_like(given["v"])

    def step() -> None:
        for t in given.values():
            t.grad = None
        call(given).backward(weight)

    torch.cuda.reset_peak_memory_stats()
    run: Callable[[], None] = captured(step) if graph else step
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    dist.barrier()
    for mark in marks[:-1]:
        mark.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)), torch.cuda.max_memory_allocated()


def slowest(run: Callable[[], tuple[float, int]]) -> tuple[float, int]:
    """Result of ``run`` in all processes at once, of the slowest one."""
    dist.barrier()
    found = torch.tensor(run(), dtype=torch.float64, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found[0].item(), int(found[1].item())


def ours(given: dict[str, Tensor]) -> Tensor:
    return linattn.linear_attention(**given)


def theirs(family: str, layout: Layout | None) -> Call:
    """fla's call of a case, on this process's part of ``layout``."""
    call = libraries.FLA_CALLS[family]
    if layout is not None:
        from fla.ops.cp import build_cp_context

        whole = torch.tensor(layout.borders, device="cuda")
        call = replace(call, options={**call.options, "cp_context": build_cp_context(whole, layout.group)})
    return call.load()


def compare(library: str, family: str, tokens: int, layout: Layout, repeats: int, graph: bool) -> dict[str, Any]:
    """Measure one case on one card and on all."""
    one, part = (ours, ours) if library == "linattn" else (theirs(family, None), theirs(family, layout))
    alone = slowest(lambda: measured(one, inputs(family, tokens), repeats, graph))
    torch.cuda.empty_cache()
    with context_parallel(layout):
        shared = slowest(lambda: measured(part, inputs(family, layout.length), repeats, graph))
    torch.cuda.empty_cache()
    row = {"library": library, "family": family, "tokens": tokens, "cards": layout.ranks, "graph": graph}
    row |= {"one_ms": alone[0], "all_ms": shared[0]}
    return row | {"efficiency": alone[0] / (layout.ranks * shared[0]), "memory": shared[1] / alone[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("linattn", "fla"), default="linattn")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--graph", action="store_true", help="in CUDA graphs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for parallel-CARD.json")
    options = parser.parse_args()
    facts, path = destination(parser, "parallel", "cuda", options.out)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if options.library == "fla":
        sys.path[:0] = [str(wheels.path(requirement)) for requirement in libraries.FLA]
        measure.quick_tuning()
    mesh = init_device_mesh("cuda", (ranks,))
    with Record(path, KEY, facts) if rank == 0 else nullcontext() as record:
        if record is not None:
            record.body["runs"][-1]["command"] = command(f"torchrun --nproc-per-node {ranks} -m benchmarks.parallel", sys.argv[1:])
        for family in options.families:
            for tokens in options.lengths:
                row = compare(options.library, family, tokens, Layout.of(mesh, tokens), options.repeats, options.graph)
                if record is not None:
                    record.add(row)
                    print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
