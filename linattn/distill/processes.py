"""Conversion in several processes, one for each accelerator: models are replicated, batches are split."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn

from linattn.train.processes import world


@dataclass(frozen=True)
class Group:
    """``count`` processes; this one has number ``rank``. Only the first writes files and prints."""

    count: int = 1
    rank: int = 0

    @property
    def first(self) -> bool:
        """True in the process that writes."""
        return self.rank == 0

    def share(self, rows: range) -> range:
        """This process's part of ``rows``, whose number :func:`started` has checked."""
        size = len(rows) // self.count
        return rows[self.rank * size : (self.rank + 1) * size]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace ``tensors`` by their means over the processes."""
        if self.count > 1:
            for t in tensors:
                distributed.all_reduce(t)
            torch._foreach_div_(list(tensors), self.count)

    def align(self, model: nn.Module) -> None:
        """Give every process the weights of the first."""
        if self.count > 1:
            for t in model.state_dict().values():
                distributed.broadcast(t, 0)

    def wait(self) -> None:
        """Wait for all processes."""
        if self.count > 1:
            distributed.barrier()


@contextmanager
def started(device: torch.device, rows: Sequence[int]) -> Iterator[Group]:
    """Group of the processes started by ``torchrun``, or of this process alone.

    Args:
        device: the process's device.
        rows: sequences of a step in each stage.

    Raises:
        ValueError: if the processes do not divide ``rows``.
    """
    count, rank = world()
    if count == 1:
        yield Group()
        return
    if uneven := [n for n in rows if n % count]:
        raise ValueError(
            f"the {count} processes must divide the sequences of a step, but there are {uneven[0]}: change batch_size or context3"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Group(count, rank)
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def device_of(device: str | None) -> torch.device:
    """Device of this process: ``device``, or the accelerator with the process's number on its machine."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    found = torch.device(device or there or "cpu")
    numbered = ":" in str(found)
    local = os.environ.get("LOCAL_RANK")
    return found if found.type != "cuda" or numbered or local is None else torch.device(found.type, int(local))
