"""Checkpoints of a model and its optimizer by tensor name, written and read by the processes that hold the shards.

torch's distributed checkpoints (DCP) in safetensors: each process writes its own shards of the optimizer and of the weights, and the first
joins the weights into the one file that every reader of models knows. Any number of processes reads any of them; nothing is pickled.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor

from linattn.parallel.tensor import fill_in_order, in_whole_order, row_orders

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer-{}-of-{}.safetensors"
_ASIDE = ("weights.part", "optimizer.part")


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as ``parameter.slot``, such as ``lm_head.weight.exp_avg``."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    return {f"{names[p]}.{slot}": t for p, slots in optimizer.state.items() for slot, t in sorted(slots.items()) if isinstance(t, Tensor)}


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights and optimizer into ``folder``, which every process sees; all of them call this."""
    weights, moments = (folder / name for name in _ASIDE)
    orders = row_orders(model)
    with _quiet():
        whole = HuggingFaceStorageWriter(str(weights), save_distributed=True, enable_consolidation=True)
        save_shards(_ordered(_weights(model), orders), storage_writer=whole)
        shards = HuggingFaceStorageWriter(str(moments), save_distributed=True)
        save_shards(_ordered(named_state(model, optimizer), orders), storage_writer=shards)
    dist.barrier()
    if dist.get_rank() == 0:
        _publish(folder, weights, moments)


def _publish(folder: Path, weights: Path, moments: Path) -> None:
    """Move the files of both folders to their names in ``folder``."""
    (whole,) = weights.glob("*.safetensors")
    whole.replace(folder / WEIGHTS)
    shards = sorted(moments.glob("*.safetensors"))
    for i, shard in enumerate(shards):
        shard.replace(folder / OPTIMIZER.format(i, len(shards)))
    for aside in (weights, moments):
        shutil.rmtree(aside)


def load_weights(folder: Path, model: nn.Module) -> None:
    """Fill the shards of ``model`` with the weights in ``folder``; all processes call this."""
    _load(_weights(model), row_orders(model), HuggingFaceStorageReader(str(folder)))


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill ``optimizer`` of ``model`` with the state in ``folder``; all processes call this."""
    reader, named = HuggingFaceStorageReader(str(folder)), dict(model.named_parameters())
    found: dict[str, dict[str, Tensor]] = {name: {} for name in named}
    for key, known in reader.read_metadata().state_dict_metadata.items():
        name, _, slot = key.rpartition(".")
        if name in named:
            shape = known.size  # type: ignore[union-attr]
            alike = slot != "step" and shape == named[name].shape
            found[name][slot] = torch.zeros_like(named[name]) if alike else torch.zeros(shape)
    _load({f"{name}.{slot}": t for name, slots in found.items() for slot, t in slots.items()}, row_orders(model), reader)
    names = {p: name for name, p in named.items()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    state = {i: found[name] for i, name in enumerate(order) if found[name]}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that are saved."""
    own = {*(n for n, _ in model.named_parameters()), *(n for n, _ in model.named_buffers())}
    return {name: t.detach() for name, t in model.state_dict().items() if name in own}


def _order_of(name: str, t: Tensor, orders: dict[str, Tensor]) -> Tensor | None:
    """Order of the rows of a parameter or of its optimizer state; None if it is that of a single process."""
    order = orders.get(name, orders.get(name.rpartition(".")[0]))
    return order if t.ndim else None


def _ordered(tensors: dict[str, Tensor], orders: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with their rows in the order of a single process."""
    found = {name: (t, _order_of(name, t, orders)) for name, t in tensors.items()}
    return {name: t if order is None else in_whole_order(cast(DTensor, t), order) for name, (t, order) in found.items()}


def _load(tensors: dict[str, Tensor], orders: dict[str, Tensor], reader: HuggingFaceStorageReader) -> None:
    """Fill ``tensors``."""
    read = _ordered(tensors, orders)
    with _quiet():
        load(read, storage_reader=reader)
    for name, t in tensors.items():
        if (order := _order_of(name, t, orders)) is not None:
            fill_in_order(cast(DTensor, t), cast(DTensor, read[name]), order)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress DCP's log of each file, and its warning about reading in a single process."""
    logger = logging.getLogger("torch.distributed.checkpoint")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    finally:
        logger.setLevel(before)
