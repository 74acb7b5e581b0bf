"""Parallel training of a language model: activation checkpointing, compilation and sharded parameters, applied in that order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from linattn.arguments import described
from linattn.models import Backbone
from linattn.parallel.kept import replicate
from linattn.parallel.tensor import distribute, share_heads

DIMENSIONS = ("dp", "cp", "tp")


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, checkpoint: bool = False, compile_blocks: bool = False, dtype: torch.dtype | None = None
) -> nn.Module:
    """Shard a language model over ``mesh``, in place, block by block.

    Tensor parallelism, the dimension ``"tp"``, is applied first: each process then has some heads of each mixer, some channels of each
    feed-forward, and the whole embedding, norms and head. The parameters of a process are then sharded over ``"dp"`` and ``"cp"``.
    Gradients are averaged over these processes, as :func:`linattn.parallel.token_loss` expects.
    Parameters in a mixer's ``keep_float32`` stay unsharded and float32.

    Args:
        model: a :class:`linattn.LanguageModel` or its Hugging Face twin, equal in every process.
        mesh: with at least one of the dimensions ``"dp"`` (processes with different sequences), ``"cp"`` (processes that share a
            sequence, :func:`linattn.parallel.context_parallel`) and ``"tp"`` (processes that share the heads).
        checkpoint: store no activations within blocks, and recompute them in the backward pass.
        compile_blocks: compile each block; exchanges between processes stay outside of the graphs.
        dtype: of parameters in the forward and backward pass, e.g. ``torch.bfloat16``; gradients are then summed in float32.

    Returns:
        ``model``.

    Raises:
        ValueError: for a mesh with other dimensions, for a model without such blocks, and for a mixer whose heads cannot be
            distributed, which the message names.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, but came as {described(mesh)}")
    names = mesh.mesh_dim_names
    if not names or not set(names) <= set(DIMENSIONS):
        raise ValueError(f"mesh must have dimensions named {' and '.join(map(repr, DIMENSIONS))}, but they are {names}")
    backbones = [m for m in model.modules() if isinstance(m, Backbone)]
    if len(backbones) != 1:
        raise ValueError(f"model must have one linattn backbone, but {type(model).__name__} has {len(backbones)}")
    (backbone,) = backbones
    if backbone.reversible:
        raise ValueError("model must not be reversible: its backward pass reads parameters that fully_shard has freed")
    tp = mesh["tp"] if "tp" in names and mesh.size(names.index("tp")) > 1 else None
    if tp is not None and compile_blocks:
        raise ValueError("compile_blocks does not run with tensor parallelism: blocks swap their parameters for this process's parts")
    backbone.gradient_checkpointing = checkpoint or backbone.gradient_checkpointing
    if compile_blocks:
        compiled(backbone)
    gradients = None if tp is None else share_heads(model, backbone, tp)
    one = _others(mesh)
    kept = replicate(model, one if tp is None else _both(one, tp), gradients)
    if tp is not None and gradients is not None:
        distribute(model, backbone, tp, gradients)
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mesh": one, "mp_policy": policy, "ignored_params": kept}
    for block in backbone.layers:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model


def compiled(backbone: Backbone) -> None:
    """Compile each block of ``backbone`` in place; blocks of the same mixer and feed-forward share one graph."""
    for block in backbone.layers:
        block.compile(dynamic=False)  # checkpoints must replay the same graph as the forward pass


def _others(mesh: DeviceMesh) -> DeviceMesh:
    """Flatten all dimensions but ``"tp"`` into one."""
    names = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    if not names:
        raise ValueError('mesh must have a dimension "dp" or "cp" beside "tp", which may have one process')
    part = mesh[tuple(names)] if len(names) < mesh.ndim else mesh
    return part if part.ndim == 1 else part._flatten("_".join(names))


def _both(one: DeviceMesh, tp: DeviceMesh) -> DeviceMesh:
    """Combine ``one`` and ``tp`` to a mesh of two dimensions, as ``fully_shard`` does."""
    return DeviceMesh._concatenate([one, tp])
