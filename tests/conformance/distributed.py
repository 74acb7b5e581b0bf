"""One of two processes that train every mixer under DDP and FSDP2; each compares with the plain mixer on the whole batch.

    python -m tests.conformance.distributed RANK RENDEZVOUS_FILE ANSWER_FILE MODULE:CLASS...

Run by test_distributed.py. Process 0 writes the errors, {"MODULE:CLASS": {"ddp": message or null, "fsdp2": ...}}, as JSON.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.conformance.tools import WIDTH, Make

Wrap = Callable[[nn.Module], nn.Module]
WORLD, STEPS = 2, 2
TOLERANCE = 1e-9


def main(rank: int, rendezvous: str, answer: str, *classes: str) -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # the machine's own name need not resolve
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=timedelta(minutes=1))
    mesh = init_device_mesh("cpu", (WORLD,))
    wraps = {"ddp": DistributedDataParallel, "fsdp2": lambda m: fully_shard(m, mesh=mesh)}
    answers: dict[str, dict[str, str | None]] = {}
    for entry in classes:
        module, name = entry.split(":")
        make = getattr(importlib.import_module(module), name)
        answers[entry] = {wrapper: wrong(make, wrap, mesh) for wrapper, wrap in wraps.items()}
    if rank == 0:
        Path(answer).write_text(json.dumps(answers), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def wrong(make: Make, wrap: Wrap, mesh: DeviceMesh) -> str | None:
    """Difference of the wrapped mixer's gradients and weights from the plain one's after some steps in any process, or None."""
    try:
        said = difference(make, wrap, mesh.get_local_rank())
    except Exception as error:  # the other process goes on to the next mixer too, so both must
        said = f"{type(error).__name__}: {error}"
    every: list[str | None] = [None] * WORLD
    dist.all_gather_object(every, said)
    return next((s for s in every if s is not None), None)


def difference(make: Make, wrap: Wrap, rank: int) -> str | None:
    torch.manual_seed(0)
    plain = make(dim=WIDTH).double()
    wrapped = wrap(copy.deepcopy(plain))
    x = torch.randn(STEPS, 2 * WORLD, 6, WIDTH, dtype=torch.float64)
    mine = slice(2 * rank, 2 * rank + 2)
    for batch in x:
        ours, theirs = train(wrapped, plain.arguments(batch[mine]), mine), train(plain, plain.arguments(batch), slice(None))
        for (key, wanted), got in zip(theirs.items(), ours.values(), strict=True):
            error = (got - wanted).abs().max().item()
            if not error <= TOLERANCE * (wanted.abs().max().item() + 1e-3):
                return f"{key} is off by {error:.2e}"
    return None


def train(model: nn.Module, arguments: tuple, rows: slice) -> dict[str, Tensor]:
    """One step of gradient descent on a weighted mean over ``rows`` of the batch; the gradients and the new weights."""
    model.zero_grad()
    y = model(*arguments)
    y = y[0] if isinstance(y, tuple) else y
    weight = torch.randn(2 * WORLD, *y.shape[1:], generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    (y * weight[rows]).mean().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    found = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            raise RuntimeError(f"{name} got no gradient")
        found[f"the gradient of {name}"], found[name] = whole(p.grad), whole(p.detach())
    return found


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t.clone()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
