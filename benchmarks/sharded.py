"""Program ``torchrun --nproc-per-node N -m benchmarks.sharded``: training steps of a language model on N GPUs.

``linattn.parallel.parallelize`` shards its parameters, which are float32, and computes in bfloat16; random tokens, AdamW in its fused form.
Each process has ``--batch`` sequences of its own, or with ``--cp`` all share one. Process 0 writes the tokens per second of the median
step, of all GPUs together, and the largest memory of a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import RESULTS, destination, positive
from linattn.bench.files import command
from linattn.bench.gpu.record import Record
from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.models.loss import IGNORED, TokenLoss, chunk_of
from linattn.parallel import Layout, context_parallel, parallelize

MODELS: dict[str, dict[str, Any]] = {
    "340M": {"dim": 1024, "layers": 24, "ffn_dim": 2816},
    "1.3B": {"dim": 2048, "layers": 24, "ffn_dim": 5632, "mixer_options": {"gla": {"heads": 8}}},  # heads of 340M's size
}
VOCABULARY = 32_000
KEY = ("model", "mixer", "context", "batch", "cards", "cp", "compiled", "checkpointed")


def build(options: argparse.Namespace, mesh: DeviceMesh) -> LinattnForCausalLM:
    """Build the model on this process's GPU and shard it."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LinattnForCausalLM(LMConfig(vocab_size=VOCABULARY, mixer=options.mixer, **MODELS[options.model])).train()
    tokens = options.batch * options.context // options.cp
    model.token_loss = TokenLoss(chunk_of(tokens, VOCABULARY), aligned=options.cp > 1)
    parallelize(model, mesh, checkpoint=options.checkpoint, compile_blocks=options.compile, dtype=torch.bfloat16)
    return model


def stepper(options: argparse.Namespace, model: LinattnForCausalLM, mesh: DeviceMesh) -> Callable[[], float]:
    """Make a training step, which returns its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    random = torch.Generator("cuda").manual_seed(1 + mesh.get_local_rank("dp"))
    ids = torch.randint(VOCABULARY, (options.batch, options.context), device="cuda", generator=random)
    labels, layout = ids, None
    if options.cp > 1:
        layout = Layout.of(mesh["cp"], options.context)
        ids, labels = layout.shard(ids, 1), layout.shard(F.pad(ids[:, 1:], (0, 1), value=IGNORED), 1)

    def step() -> float:
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        with nullcontext() if layout is None else context_parallel(layout):
            model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    return step


def measure(options: argparse.Namespace) -> dict[str, Any]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks // options.cp, options.cp), mesh_dim_names=("dp", "cp"))
    model = build(options, mesh)
    parameters = sum(p.numel() for p in model.parameters())
    step = stepper(options, model, mesh)
    first = step()
    step()
    torch.cuda.reset_peak_memory_stats()
    slowest = torch.tensor([statistics.median(step() for _ in range(options.steps)), torch.cuda.max_memory_allocated()], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds, peak = slowest.tolist()
    row = {"model": options.model, "mixer": options.mixer, "context": options.context, "cards": ranks, "cp": options.cp}
    row |= {"compiled": options.compile, "checkpointed": options.checkpoint, "batch": options.batch, "parameters": parameters}
    row |= {"first_step_s": first, "step_ms": seconds * 1e3, "peak_gb": peak / 2**30}
    return row | {"tokens_per_second": options.batch * options.context * ranks / options.cp / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1.3B")
    parser.add_argument("--mixer", default="gla")
    parser.add_argument("--context", type=positive, default=4096, help="tokens of a sequence")
    parser.add_argument("--batch", type=positive, default=8, help="sequences of a step, in each group of processes that share them")
    parser.add_argument("--cp", type=positive, default=1, help="processes that share a sequence")
    parser.add_argument("--steps", type=positive, default=8)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--checkpoint", action="store_true", help="save only the inputs of blocks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for sharded-CARD.json")
    options = parser.parse_args()
    facts, path = destination(parser, "sharded", "cuda", options.out)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    row = measure(options)
    if dist.get_rank() == 0:
        with Record(path, KEY, facts) as record:
            run = f"torchrun --nproc-per-node {row['cards']} -m benchmarks.sharded"
            record.body["runs"][-1]["command"] = command(run, sys.argv[1:])
            record.add(row)
        print({name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()}, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
