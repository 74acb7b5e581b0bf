"""Tensor parallelism: processes with the same tokens share the heads of each mixer and the channels of each feed-forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from linattn.mixers import Mixer
from linattn.models import Backbone
from linattn.parallel import heads
from linattn.parallel.heads import Cut

Gradients = dict[nn.Parameter, tuple[Placement, float]]  # by parameter: placement of its gradients, and a process's share


class _Shared(torch.autograd.Function):
    """Identity of a tensor that all processes of ``group`` read; backward sums their gradients."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return _sum(cotangent, ctx.group), None


class _Summed(torch.autograd.Function):
    """All-reduce sum over the processes of ``group``; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(t, group)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent, None


def _sum(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = t.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def share_heads(model: nn.Module, backbone: Backbone, mesh: DeviceMesh) -> Gradients:
    """Replace each mixer and feed-forward of ``model`` by this process's part, which stores the order of its rows, see :func:`row_orders`.

    Returns for each parameter of the model the placement of its gradients and the share of it that each process uses.

    Raises:
        ValueError: naming the mixer or feed-forward that cannot be cut; the model is unchanged then.
    """
    config: Any = model.config
    count, found = mesh.size(), []
    for i, block in enumerate(backbone.layers):
        for slot, options in (("mixer", config.options_of(i)), ("ffn", config.ffn_options_of(i))):
            whole = getattr(block, slot)
            if whole is not None:
                found.append((block, slot, *_part(whole, options, count)))
    for block, slot, own, cuts in found:
        whole = getattr(block, slot)
        heads.fill(own, dict(heads.tensors(whole)), cuts, mesh.get_local_rank(), count)
        setattr(block, slot, _joined(own.train(whole.training), mesh.get_group()))
    gradients: Gradients = {p: (Replicate(), 1.0) for p in model.parameters()}
    for _, _, own, cuts in found:
        gradients |= {p: _placement(cuts[name], count) for name, p in own.named_parameters()}
        own.row_order = {name: order for name, cut in cuts.items() if (order := cut.order(count)) is not None}  # type: ignore[assignment]
    return gradients


def _part(whole: Mixer, options: dict[str, Any], count: int) -> tuple[Mixer, dict[str, Cut]]:
    try:
        why = heads.refusal(whole, options, count)
        if why is None:
            return heads.part(whole, options, count)
    except ValueError as error:
        why = str(error)
    raise ValueError(f"{whole.info.name} does not run under tensor parallelism of {count}: {why}")


def _placement(cut: Cut, count: int) -> tuple[Placement, float]:
    return (Partial() if cut.dim is None else Shard(cut.dim)), 1 / count if cut.once else 1.0


def _joined(own: Mixer, group: dist.ProcessGroup) -> Mixer:
    """Hook ``own`` so that its gradients of the input, and its outputs, are summed over the processes."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return _Shared.apply(args[0], group), *args[1:]

    def after(_: nn.Module, __: Any, out: Any) -> Any:
        return (_Summed.apply(out[0], group), *out[1:]) if isinstance(out, tuple) else _Summed.apply(out, group)

    own.register_forward_pre_hook(before)
    own.register_forward_hook(after)
    return own


def row_orders(model: nn.Module) -> dict[str, Tensor]:
    """For each parameter of fused projections the indices of the whole's rows in the concatenated parts."""
    return {f"{place}.{name}": order for place, m in model.named_modules() for name, order in getattr(m, "row_order", {}).items()}


def in_whole_order(t: DTensor, order: Tensor) -> DTensor:
    """Copy a fused projection, or its optimizer state, with the rows in the order of a single process, sharded by rows."""
    stored = t.full_tensor()
    rows = torch.empty_like(stored).index_copy_(0, order.to(stored.device), stored)
    return distribute_tensor(rows, t.device_mesh, [Shard(0), Replicate()], src_data_rank=None)


def fill_in_order(t: DTensor, whole: DTensor, order: Tensor) -> None:
    """Undo :func:`in_whole_order`: fill ``t`` from ``whole``."""
    full = whole.full_tensor()
    rows = full[order.to(full.device)].chunk(t.device_mesh.size(1))[t.device_mesh.get_local_rank(1)]
    own = rows.chunk(t.device_mesh.size(0))
    local, rank = t.to_local(), t.device_mesh.get_local_rank(0)
    if rank < len(own):
        local.copy_(own[rank])


def distribute(model: nn.Module, backbone: Backbone, mesh: DeviceMesh, gradients: Gradients) -> None:
    """Make the parameters in ``gradients`` DTensors of ``mesh``, which are plain tensors during the forward passes of blocks and model."""
    inside = {p for block in backbone.layers for p in block.parameters()}
    for unit in (*backbone.layers, model):
        swap = Local()
        for p, (placement, share) in gradients.items():
            owners = [] if unit is model and p in inside else _owners(unit, p)
            if owners:
                stored = Replicate() if isinstance(placement, Partial) else placement
                whole = DTensor.from_local(p.detach(), mesh, [stored], run_check=False)
                swap.add(owners, nn.Parameter(whole, p.requires_grad), placement, share)
        unit.register_forward_pre_hook(swap.plain)
        unit.register_forward_hook(swap.back, always_call=True)


def _owners(unit: nn.Module, p: nn.Parameter) -> list[tuple[nn.Module, str]]:
    """Modules in ``unit`` that have ``p`` as their own parameter, and its name there; several if it is tied."""
    return [(module, name) for module in unit.modules() for name, own in module._parameters.items() if own is p]


class Local:
    """Hooks that replace DTensor parameters by this process's plain tensors while a module runs."""

    def __init__(self) -> None:
        self.places: list[tuple[list[tuple[nn.Module, str]], Placement, float]] = []
        self.held: list[Any] = []

    def add(self, owners: list[tuple[nn.Module, str]], p: nn.Parameter, placement: Placement, share: float) -> None:
        """Add the parameter ``p`` of ``owners``, whose gradients have ``placement``."""
        self.places.append((owners, placement, share))
        _set(owners, p)

    def plain(self, *_: Any) -> None:
        self.held = [module._parameters[name] for ((module, name), *_), _, _ in self.places]
        for (owners, placement, share), p in zip(self.places, self.held, strict=True):
            local = p.to_local(grad_placements=[placement])
            _set(owners, local if share == 1 else local * share)

    def back(self, *_: Any) -> None:
        for place, p in zip(self.places, self.held, strict=True):
            _set(place[0], p)


def _set(owners: list[tuple[nn.Module, str]], t: Any) -> None:
    for module, name in owners:
        module._parameters[name] = t
