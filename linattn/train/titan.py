"""Language models of linattn in torchtitan's trainer: its ``ModelSpec``, and a data loader for ``linattn data prepare``.

A file of your own names the model and the data::

    from linattn.train.titan import trainer_config

    def hybrid():
        return trainer_config("tokens", mixer="gated_deltanet*3, softmax", dim=1024, layers=24)

    torchrun --nproc-per-node 8 -m torchtitan.train --module my_file --config hybrid --training.steps 1000

torchtitan's options set the rest: batch, optimizer, schedule, compilation, activation checkpointing, checkpoints. Parameters are sharded
by :func:`linattn.parallel.parallelize` over all processes. torchtitan's tensor, context and pipeline parallelism need its own layers and
are refused; ``linattn train --tp --cp`` has them. Needs torchtitan 0.3 and the torch that it asks for, newer than 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.trainer import Trainer

from linattn.data import PackedTokens, prepared
from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.parallel import parallelize
from linattn.train.speed import token_flops

REFUSED = ("dp_replicate", "tp", "cp", "pp", "ep")
PREFIX = "model."


class TitanModel(BaseModel):
    """A :class:`linattn.hf.LinattnForCausalLM` for torchtitan, built on the meta device and filled by :meth:`init_states`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """``options`` are the arguments of :class:`linattn.hf.LMConfig`."""

        options: dict[str, Any] = field(default_factory=dict)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Do nothing: models do not depend on the trainer."""

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Count parameters, and operations of a training token."""
            return sum(p.numel() for p in model.parameters()), round(token_flops(LMConfig(**self.options), seq_len))

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.options, self.processes = config.options, 1
        self.model = LinattnForCausalLM(LMConfig(**config.options))

    def verify_module_protocol(self) -> None:
        """Do nothing: layers are plain modules; :meth:`init_states` and :func:`shard` replace torchtitan's protocol."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Fill all parameters and buffers with those of a model that the first process builds on the CPU."""
        with torch.device("cpu"):
            whole = LinattnForCausalLM(LMConfig(**self.options))
        values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        for name, own in [*self.model.named_parameters(), *self.model.named_buffers()]:
            value = values[name].detach().to(own.device, own.dtype)
            own.copy_(distribute_tensor(value, own.device_mesh, own.placements) if isinstance(own, DTensor) else value)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, **_: Any) -> Tensor:
        """Compute logits [B, T, V]; ``positions`` [B, T] begin anew with each document."""
        logits = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        if logits.requires_grad and self.processes > 1:  # FSDP averages gradients, but torchtitan's loss is this process's term of a sum
            logits.register_hook(lambda gradient: gradient * self.processes)
        return logits


def shard(
    model: TitanModel, *, parallel_dims: Any, training: TrainingConfig, compile_config: Any, ac_config: Any, **_: Any
) -> TitanModel:  # fmt: skip
    """Apply activation checkpointing, compilation and FSDP2; torchtitan's ``parallelize_fn``.

    Raises:
        ValueError: for parallelism that needs torchtitan's own layers.
    """
    if asked := [name for name in REFUSED if getattr(parallel_dims, name) > 1]:
        raise ValueError(f"linattn's models shard over all processes under torchtitan, without {' and '.join(asked)}: use linattn train")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.processes = dist.get_world_size()
    mesh = init_device_mesh(device, (model.processes,), mesh_dim_names=("dp",))
    dtype, compiled = TORCH_DTYPE_MAP[training.mixed_precision_param], compile_config.enable and "model" in compile_config.components
    parallelize(model.model, mesh, checkpoint=ac_config is not None, compile_blocks=compiled, dtype=dtype)
    return model


class Names(StateDictAdapter):
    """Parameter names of the model as :class:`LinattnForCausalLM` saves them, and back."""

    def __init__(self, model_config: TitanModel.Config, hf_assets_path: str | None) -> None:
        self.fqn_to_index_mapping, self.hf_assets_path = None, hf_assets_path

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Drop the prefix."""
        return {name.removeprefix(PREFIX): value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Add the prefix."""
        return {PREFIX + name: value for name, value in hf_state_dict.items()}


class PreparedLoader(BaseDataLoader):
    """Batches of a folder of ``linattn data prepare``, in the order of ``linattn train``; documents are isolated."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """``dataset_path`` is the folder."""

        seed: int = 0

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        if config.dataset_path is None:
            raise ValueError("dataset_path must be a folder of linattn data prepare")
        tokens = prepared(config.dataset_path).train
        self.data = PackedTokens(tokens, seq_len + 1, seed=config.seed, samples=0)
        self.step, self.rows, self.rank, self.ranks = 0, local_batch_size, dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = (self.step * self.ranks + self.rank) * self.rows
            samples = [self.data[first + row] for row in range(self.rows)]
            self.step += 1
            ids, labels = (torch.stack([one[name] for one in samples]) for name in ("input_ids", "labels"))
            begins = torch.zeros_like(ids).index_fill_(1, torch.tensor([0]), 1)
            for row, one in enumerate(samples):
                begins[row, one["starts"]] = 1
            places = torch.arange(ids.shape[1]).expand_as(ids)
            positions = places - (places * begins).cummax(1).values
            yield {"input": ids[:, :-1], "positions": positions[:, :-1]}, labels[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Number of batches read."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after that batch."""
        self.step = state_dict["step"]


def trainer_config(data: str | os.PathLike[str], **options: Any) -> Trainer.Config:
    """Make torchtitan's configuration of a training.

    Args:
        data: a folder of ``linattn data prepare``.
        options: arguments of :class:`linattn.hf.LMConfig` but ``vocab_size``, which is the data's.
    """
    config = TitanModel.Config(options={"vocab_size": prepared(data).vocab_size, **options})
    return Trainer.Config(
        model_spec=ModelSpec("linattn", str(options.get("mixer", "gla")), config, shard, None, None, Names),
        hf_assets_path=os.fspath(data),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(),
        dataloader=PreparedLoader.Config(dataset_path=os.fspath(data)),
        training=TrainingConfig(disable_cuda_graphs=True),  # where documents begin is read on the host
    )
