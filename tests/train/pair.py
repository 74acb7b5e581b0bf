"""One of several processes that train together, one run after the other.

    python -m tests.train.pair RANK RENDEZVOUS_FILE ANSWER_FILE RANKS RUNS

RUNS is JSON: a list of options, each with "out" and "text". Process 0 writes, as JSON, the results of each run: its history, and the
digest of the whole weights and optimizer that it resumed from. "die" in the options names a function of linattn.train.sharded in whose
second call process 0 is killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from linattn.parallel.tensor import row_orders
from linattn.train import TrainOptions, sharded
from linattn.train.trainer import RunTrainer
from linattn.train.training import train


def main(rank: int, rendezvous: str, answer: str, ranks: int, runs: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timedelta(minutes=2))
    answers = [outcome(options, rank) for options in json.loads(runs)]
    if rank == 0:
        Path(answer).write_text(json.dumps(answers), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def outcome(options: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train, and return the results."""
    if (name := options.pop("die", None)) is not None and rank == 0:
        kill_in(name)
    with recorded() as loaded:
        result = train(options_of(options), progress=False)
    return {"history": result.history, "parameters": result.parameters, "loaded": loaded}


def options_of(given: dict[str, Any]) -> TrainOptions:
    """Options from JSON."""
    paths = {name: Path(given[name]) for name in ("out", "data") if name in given}
    return TrainOptions(**{**given, **paths, "text": tuple(given["text"])})


class recorded:
    """Context in which a resumed run records the digest of the weights it has read."""

    def __enter__(self) -> list[str]:
        found: list[str] = []
        self.before = RunTrainer._load_optimizer_and_scheduler

        def load(trainer: RunTrainer, folder: str | None) -> None:
            self.before(trainer, folder)
            if folder is not None:
                tensors = trainer.model.state_dict() | sharded.named_state(trainer.model, trainer.optimizer.optimizer)
                found.append(digest({name: whole(name, t, trainer.model) for name, t in tensors.items()}))

        RunTrainer._load_optimizer_and_scheduler = load
        return found

    def __exit__(self, *_: object) -> None:
        RunTrainer._load_optimizer_and_scheduler = self.before


def whole(name: str, t: Tensor, model: torch.nn.Module) -> Tensor:
    """The full tensor of ``t``."""
    if not isinstance(t, DTensor):
        return t
    orders, full = row_orders(model), t.full_tensor()
    order = next((o for n, o in orders.items() if name == n or name.rpartition(".")[0] == n), None)
    return full if order is None else torch.zeros_like(full).index_copy_(0, order, full)


def digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, shapes and bits."""
    found = hashlib.sha256()
    for name, t in sorted(tensors.items()):
        found.update(f"{name} {list(t.shape)} {t.dtype}".encode())
        found.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def kill_in(name: str) -> None:
    """Let the second call of a function of the module end this process."""
    real, calls = getattr(sharded, name), []

    def dying(*args: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    setattr(sharded, name, dying)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
