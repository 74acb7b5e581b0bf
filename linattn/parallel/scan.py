"""Exchange of states among many processes in logarithmically many steps, in place of an all-gather of all states.

In step i process r receives from process r - 2^i the result of the 2^i processes up to that one (Hillis and Steele). After the last
step each has the state after its part; one more step shifts it to the state before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linattn.parallel.collectives import follow


class _Shift(torch.autograd.Function):
    """Receive t of the process ``distance`` before this one, ``empty`` if there is none; backward returns the gradients."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, empty: Tensor, distance: int, group: dist.ProcessGroup) -> Tensor:
        ctx.distance, ctx.group = distance, group
        return _moved(t, empty, distance, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        return _moved(cotangent, torch.zeros_like(cotangent), -ctx.distance, ctx.group), None, None, None


class _Ends(torch.autograd.Function):
    """Receive t of the process before this one, ``empty`` in the first, and t of the last process.

    Both in one function, so that the order of the collectives is fixed in backward too.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, empty: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        before, last = _moved(t, empty, 1, group), t.contiguous().clone()
        dist.broadcast(last, group=group, group_src=group.size() - 1)
        return before, last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, before: Tensor, last: Tensor) -> tuple[Tensor | None, ...]:
        own, total = _moved(before, torch.zeros_like(before), -1, ctx.group), last.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return own + total if ctx.group.rank() == ctx.group.size() - 1 else own, None, None


def _moved(t: Tensor, empty: Tensor, distance: int, group: dist.ProcessGroup) -> Tensor:
    """Receive t of the process ``distance`` before this one in ``group``, after it if negative; ``empty`` if there is none."""
    source, target = group.rank() - distance, group.rank() + distance
    got, operations = empty.expand_as(t).contiguous().clone(), []
    if 0 <= target < group.size():
        operations.append(dist.P2POp(dist.isend, t.contiguous(), group=group, group_peer=target))
    if 0 <= source < group.size():
        operations.append(dist.P2POp(dist.irecv, got, group=group, group_peer=source))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return got


def scan(
    own: Tensor, link: Tensor | None, join: Any, empty: tuple[float, Tensor | None], inputs: list[Tensor | None], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Combine the parts of all processes before this one, and of all processes: states from an empty start, and links.

    Args:
        own: [B, ...], the state after this process's part from an empty start, of the same shape in every process.
        link: link of its part; None: the identity.
        join: (own, link, state) -> the state after a part; see :func:`composed`.
        empty: the state before the first token, and the link of no tokens.
        inputs: tensors from which some process computes ``own`` and ``link``; the exchange is in the graph of each.
        group: the processes.
    """
    nothing = torch.as_tensor(empty[0], dtype=own.dtype, device=own.device)
    both = _Packed(own, link, nothing, empty[1])
    t, distance = follow(both.pack(own, link), inputs), 1
    while distance < group.size():
        state, before = both.unpack(_Shift.apply(t, both.empty, distance, group))
        mine, linked = both.unpack(t)
        t = both.pack(join(mine, linked, state), None if linked is None else composed(join, linked, before))
        distance *= 2
    found, last = (both.unpack(part) for part in _Ends.apply(t, both.empty, group))
    return *found, *last


def composed(join: Any, link: Tensor, before: Tensor | None) -> Tensor:
    """Compose the links of two consecutive parts, by ``join`` with an empty state."""
    assert before is not None
    return join(torch.zeros_like(link) if join.__name__ != "largest" else torch.full_like(link, -torch.inf), link, before)


class _Packed:
    """States and links of one process as one real tensor [B, numbers], or of complex ones [B, numbers, 2]."""

    def __init__(self, own: Tensor, link: Tensor | None, nothing: Tensor, identity: Tensor | None) -> None:
        self.shapes = [own.shape, *([] if link is None else [link.shape])]
        unchanged = None if link is None or identity is None else identity.expand_as(link)
        self.empty = self.pack(nothing.expand_as(own), unchanged)

    def pack(self, own: Tensor, link: Tensor | None) -> Tensor:
        t = torch.cat([t.reshape(len(own), -1) for t in (own, link) if t is not None], 1)
        return torch.view_as_real(t) if t.is_complex() else t

    def unpack(self, t: Tensor) -> tuple[Tensor, Tensor | None]:
        t = torch.view_as_complex(t) if t.ndim == 3 else t
        parts = t.split([shape[1:].numel() for shape in self.shapes], 1)
        own, *links = (part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True))
        return own, links[0] if links else None
