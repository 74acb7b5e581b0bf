"""Division of a training among processes: over sequences, parts of a sequence, heads, and parameters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.utils.data import Sampler

from linattn.models.loss import IGNORED
from linattn.parallel import Layout, context_parallel, parallelize
from linattn.train.options import TrainOptions


@dataclass(frozen=True)
class Processes:
    """``count`` processes in the order (dp, cp, tp), the last one fastest; this one has number ``rank``.

    Args:
        cp: processes that share a sequence.
        tp: processes that share the heads of each mixer and the channels of each feed-forward.
        fsdp: whether parameters, gradients and optimizer are sharded; else they are replicated.
        device: type of their devices.
    """

    count: int = 1
    rank: int = 0
    cp: int = 1
    tp: int = 1
    fsdp: bool = False
    device: str = "cpu"

    @classmethod
    def of(cls, options: TrainOptions, device: str) -> Processes:
        """Processes started by ``torchrun`` or ``accelerate launch``.

        Raises:
            ValueError: where cp x tp does not divide their number.
        """
        count, rank = world()
        check(options, count)
        # a single process shards nothing: its run may have been started by several processes
        return cls(count, rank, options.cp, options.tp, count > 1 and (options.fsdp or options.tp > 1), device)

    @property
    def dp(self) -> int:
        """Groups of processes with sequences of their own."""
        return self.count // self.sharing

    @property
    def sharing(self) -> int:
        """Processes that have the same sequences."""
        return self.cp * self.tp

    @property
    def group(self) -> int:
        """Number of this process's group, 0 to dp - 1."""
        return self.rank // self.sharing

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All processes as [dp, cp, tp]."""
        return init_device_mesh(self.device, (self.dp, self.cp, self.tp), mesh_dim_names=("dp", "cp", "tp"))

    def parallelize(self, model: nn.Module, options: TrainOptions) -> None:
        """Shard ``model``, on its device, in place."""
        dtype = torch.bfloat16 if options.dtype == "bf16" else None
        parallelize(model, self.mesh, compile_blocks=options.compile, dtype=dtype)

    def shared(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], AbstractContextManager[None]]:
        """This process's part of a batch, and the context for the model's call.

        ``labels`` [B, T] become targets: the label of the next token, -100 at the last one.
        """
        if self.cp == 1:
            return inputs, nullcontext()
        cu = inputs.get("cu_seqlens")
        layout = self._layout(inputs["input_ids"].shape[1], None if cu is None else tuple(cu.tolist()))
        targets = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
        part = {"input_ids": layout.shard(inputs["input_ids"], 1), "labels": layout.shard(targets, 1)}
        return part, context_parallel(layout)

    def _layout(self, tokens: int, cu_seqlens: tuple[int, ...] | None) -> Layout:
        return Layout.of(self.mesh["cp"], tokens, cu_seqlens=cu_seqlens)

    def summed(self, t: Tensor) -> Tensor:
        """Sum of ``t`` over all parts of all sequences, without duplicates."""
        if self.count > 1:
            torch.distributed.all_reduce(t)
        return t / self.tp


def leave() -> None:
    """Destroy this process's groups, if any, after a barrier.

    Otherwise a process that ends while gloo's threads hold tensors of the last exchange is aborted.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


class Batches(Sampler):
    """Batches of ``size`` of the samples from ``first`` to ``count`` for one of several groups, assigned in turn."""

    def __init__(self, first: int, count: int, size: int, processes: Processes) -> None:
        self.first, self.count, self.size, self.processes = first, count, size, processes

    def __iter__(self) -> Iterator[list[int]]:
        step = self.size * self.processes.dp
        for start in range(self.first + self.processes.group * self.size, self.count, step):
            yield list(range(start, min(start + self.size, self.count)))

    def padded(self) -> Iterator[list[int]]:
        """These batches, and an empty one at the end if another group has one more."""
        step = self.size * self.processes.dp
        own = list(self)
        yield from own + [[]] * (-(-(self.count - self.first) // step) - len(own))

    def __len__(self) -> int:
        return (self.count - self.first) // (self.size * self.processes.dp)


def world() -> tuple[int, int]:
    """Number of processes that a launcher has started, and this one's."""
    return int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def check(options: TrainOptions, count: int) -> None:
    """Raise ValueError unless the processes that share a sequence or heads divide ``count`` processes."""
    sharing = options.cp * options.tp
    if count % sharing:
        raise ValueError(
            f"cp x tp must divide the number of processes, but came as {options.cp} x {options.tp} with {count}: "
            f"start torchrun --nproc-per-node {sharing} -m linattn train ..., or give another --cp and --tp"
        )


def accumulation(options: TrainOptions, samples: int) -> int:
    """Number of passes per step that gives ``samples`` sequences with the current number of processes.

    Raises:
        ValueError: if no number of passes gives exactly these.
    """
    once = options.batch_size * (world()[0] // (options.cp * options.tp))
    if samples % once:
        raise ValueError(
            f"a step of this run has {samples} sequences, so the {once} sequences of a pass over all processes must divide it: "
            f"batch_size came as {options.batch_size}"
        )
    return samples // once
