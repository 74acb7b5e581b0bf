"""Parameters that stay float32 under ``fully_shard``: replicated, with averaged gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from linattn.mixers import Mixer
from linattn.parallel.tensor import Gradients


class _Averaged(torch.autograd.Function):
    """Identity whose backward pass averages over the processes of ``group`` in one collective."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        flat = torch.cat([c.flatten() for c in cotangents])
        dist.all_reduce(flat, group=ctx.group)
        parts = (flat / ctx.group.size()).split([c.numel() for c in cotangents])
        return None, *(p.view_as(c) for p, c in zip(parts, cotangents, strict=True))


def replicate(model: nn.Module, mesh: DeviceMesh, gradients: Gradients | None = None) -> set[nn.Parameter]:
    """Make the ``keep_float32`` parameters of all mixers replicated DTensors, which are plain tensors during their mixer's forward pass.

    ``mesh`` has one dimension, or a second one of tensor parallelism. In that case ``gradients`` describe the cuts, see
    :mod:`linattn.parallel.tensor`, and the parameters that are replicated here are removed from it.

    Returns these parameters, for ``fully_shard``'s ``ignored_params``. As DTensors they combine with the sharded parameters in
    optimizers, clipping and checkpoints.
    """
    found: set[nn.Parameter] = set()
    for mixer in model.modules():
        names = [n for n in mixer.keep_float32 if getattr(mixer, n) is not None] if isinstance(mixer, Mixer) else []
        if not names:
            continue
        for name in names:
            own = getattr(mixer, name)
            cut = [] if gradients is None else [gradients.pop(own)[0]]
            if any(isinstance(p, Partial) for p in cut):
                raise ValueError(f"{cast(Mixer, mixer).info.name} does not run under tensor parallelism: all heads share its {name}")
            whole = DTensor.from_local(own.detach(), mesh, [Replicate(), *cut], run_check=False)
            setattr(mixer, name, nn.Parameter(whole, requires_grad=own.requires_grad))
            found.add(getattr(mixer, name))
        swap = _Swap(names, mesh.get_group(0))
        mixer.register_forward_pre_hook(swap.plain)
        mixer.register_forward_hook(swap.back, always_call=True)
    return found


class _Swap:
    """Forward hooks that replace a mixer's DTensor parameters by plain tensors while it runs."""

    def __init__(self, names: list[str], group: dist.ProcessGroup) -> None:
        self.names, self.group = names, group

    def plain(self, mixer: nn.Module, _: Any) -> None:
        self.parameters = [mixer._parameters[name] for name in self.names]
        local = [p.to_local() for p in self.parameters]  # type: ignore[union-attr]
        if torch.is_grad_enabled():
            local = list(_Averaged.apply(self.group, *local))
        mixer._parameters.update(zip(self.names, local, strict=True))

    def back(self, mixer: nn.Module, *_: Any) -> None:
        mixer._parameters.update(zip(self.names, self.parameters, strict=True))
