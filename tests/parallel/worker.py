"""One of several processes that run all cases of context parallelism and compare with a single process.

    python -m tests.parallel.worker RANK RENDEZVOUS_FILE ANSWER_FILE RANKS MODULE:FUNCTION...

Each function gives (name, case) for a mesh. Process 0 writes {name: error or null} as JSON. With ``LINATTN_TEST_DEVICE=cuda``
each process has its own GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel import compare


def main(rank: int, rendezvous: str, answer: str, ranks: int, *cases: str) -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # the machine's own name need not resolve
    torch.set_num_threads(1)
    compare.DEVICE = os.environ.get("LINATTN_TEST_DEVICE", "cpu")
    if compare.DEVICE == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if compare.DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(minutes=2))
    mesh = init_device_mesh(compare.DEVICE, (ranks,))
    answers: dict[str, str | None] = {}
    for entry in cases:
        module, function = entry.split(":")
        for name, case in getattr(importlib.import_module(module), function)(mesh):
            answers[name] = said(case, ranks)
    if rank == 0:
        Path(answer).write_text(json.dumps(answers), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def said(case: Callable[[], str | None], ranks: int) -> str | None:
    """Errors in any process."""
    try:
        own = case()
    except Exception:  # the other processes go on to the next case too, so all must
        own = traceback.format_exc(limit=-4)
        print(own, file=sys.stderr, flush=True)  # in case the others are blocked
    every: list[str | None] = [None] * ranks
    dist.all_gather_object(every, own)
    return next((f"process {i}: {s}" for i, s in enumerate(every) if s is not None), None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
