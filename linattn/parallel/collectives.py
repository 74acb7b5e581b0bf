"""The collective of context parallelism: an all-gather whose gradient is the sum over all processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has renamed both
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Gathering:
    """All-gathers of kernels, which differentiate their exchange themselves: :class:`linattn.ops.sharding.Group`."""

    group: dist.ProcessGroup
    joined: bool
    passes: bool

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> int:
        return self.group.size()

    def gather(self, t: Tensor) -> Callable[[], Tensor]:
        out = t.new_empty(self.ranks * t.shape[0])
        work = _all_gather(out, t, group=self.group, async_op=True)

        def received() -> Tensor:
            work.wait()
            return out.view(self.ranks, -1)

        return received


class _Gather(torch.autograd.Function):
    """[M, ...] of each process -> [ranks M, ...]; backward sums the cotangents of all processes and selects this process's part."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = t.new_empty(t.shape[0] * group.size(), *t.shape[1:])
        _all_gather(out, t.contiguous(), group=group)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        own = cotangent.new_empty(cotangent.shape[0] // ctx.group.size(), *cotangent.shape[1:])
        _reduce_scatter(own, cotangent.contiguous(), group=ctx.group)
        return own, None


class _Tie(torch.autograd.Function):
    """Identity of the first argument; the others get gradients of zero, so that their backward passes run."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(o.shape, o.dtype, o.device) for o in others]
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, ...]:
        return cotangent, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)


class _Follow(torch.autograd.Function):
    """Identity of the first argument, with the others in its graph, which get no gradients from it."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return cotangent, *[None] * ctx.others


def all_gather(t: Tensor, group: dist.ProcessGroup, of: Sequence[Tensor | None] = ()) -> Tensor:
    """Gather ``t`` [M, ...], of the same shape in every process, as [ranks M, ...]; differentiable once.

    ``of`` are the inputs from which some process computes ``t``. In every process the result depends on them in the graph, so that all
    backward passes take part in the collective if one does.
    """
    if t.is_complex():
        return torch.view_as_complex(all_gather(torch.view_as_real(t), group, of))
    out: Tensor = _Gather.apply(follow(t, of), group)
    return out


def follow(t: Tensor, others: Sequence[Tensor | None]) -> Tensor:
    """Return ``t`` with ``others`` in its graph, which get no gradients from it."""
    inputs = [o for o in others if o is not None and o.requires_grad] if torch.is_grad_enabled() else []
    found: Tensor = _Follow.apply(t, *inputs) if inputs else t
    return found


def tie(t: Tensor, *others: Tensor | None) -> Tensor:
    """Return ``t`` with ``others`` in its graph: a collective that is missing in one process's backward pass would block all others."""
    held = [o for o in others if o is not None and o.requires_grad]
    return _Tie.apply(t, *held) if held else t
