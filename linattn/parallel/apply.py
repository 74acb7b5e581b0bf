"""A language model over many cards: activation checkpointing, compilation and sharded parameters, in that order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from linattn.arguments import described
from linattn.models import Backbone
from linattn.parallel.kept import replicate

DIMENSIONS = ("dp", "cp")


def parallelize(
    model: nn.Module, mesh: DeviceMesh, *, checkpoint: bool = False, compile_blocks: bool = False, dtype: torch.dtype | None = None
) -> nn.Module:
    """Shard a language model over ``mesh``, in place, block by block.

    Gradients are averaged over all processes of the mesh, those that share a sequence among them, as
    :func:`linattn.parallel.token_loss` counts on. Parameters in a mixer's ``keep_float32`` stay whole and float32.

    Args:
        model: a :class:`linattn.LanguageModel` or its transformers kind, the same in every process.
        mesh: with dimensions named ``"dp"``, processes with sequences of their own, or ``"cp"``, processes that share one
            (:func:`linattn.parallel.context_parallel`), or both.
        checkpoint: keep no activations within blocks, and compute them again in the backward pass.
        compile_blocks: compile each block; exchanges between processes stay outside of the graphs.
        dtype: of parameters in the forward and backward pass, e.g. ``torch.bfloat16``; gradients are then summed in float32.

    Returns:
        ``model``.

    Raises:
        ValueError: for a mesh with other dimensions, and for a model without such blocks.
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
        raise ValueError("model must not be reversible: its backward pass reads parameters that fully_shard has put away")
    backbone.gradient_checkpointing = checkpoint or backbone.gradient_checkpointing
    if compile_blocks:
        for block in backbone.layers:
            block.compile(dynamic=False)  # checkpoints must find the graph of the forward pass again
    one = mesh if mesh.ndim == 1 else mesh._flatten("_".join(names))
    policy = MixedPrecisionPolicy() if dtype is None else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    how: dict[str, Any] = {"mesh": one, "mp_policy": policy, "ignored_params": replicate(model, one)}
    for block in backbone.layers:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model
