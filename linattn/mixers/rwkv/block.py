"""Shared parts of the RWKV family: the token shift, the norm of each head, and gates that read shifted tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import at_least, check_place, head_size, to_float32
from linattn.ops import flops


def previous(x: Tensor, call: CallContext, name: str = "last") -> Tensor:
    """Token before each of ``x`` [B, T, D], zeros at the start of a sequence; ``name`` keeps the last one [rows, 1, D]."""
    longer, places = call.context(name, x, 1)
    return longer[:, :-1] if places is None else longer.index_select(1, places - 1)


def ramp(dim: int, power: float) -> Tensor:
    """Initial mix of a token with the previous one: (i / dim) ** power for every channel i."""
    return (torch.arange(dim) / dim) ** power


def zigzag(dim: int) -> Tensor:
    """Sequence 0, 1, -1, 0, 1, -1, ... over the channels."""
    return ((torch.arange(dim) + 1) % 3 - 1).float()


def heads_of(dim: int, size: int | None) -> int:
    """Number of heads of ``size`` channels; None is 64, or 32 where 64 does not divide ``dim``."""
    size = (64 if dim % 64 == 0 else 32) if size is None else size
    if size < 1 or dim % size:
        raise ValueError(f"dim must be a positive multiple of head_size, but came as {dim} with head_size {size}")
    return dim // size


def ratios(layer: int, layers: int) -> tuple[float, float]:
    """Parameters of the initialisation of layer ``layer`` of ``layers``: one from 0 to 1, and one from 1 to almost 0."""
    check_place(layer, layers)
    return layer / max(layers - 1, 1), 1 - layer / layers


def place_of(index: int, count: int) -> dict[str, Any]:
    """Options of layer ``index`` of ``count`` for :func:`ratios`."""
    return {"layer": index, "layers": count}


class GroupNorm(nn.Module):
    """Layer norm of each head, [B, T, H, V] -> [B, T, H V], in float32; weights for every channel."""

    def __init__(self, heads: int, channels: int, eps: float = 64e-5) -> None:
        super().__init__()
        at_least(0, eps=eps)
        self.size, self.eps = head_size("channels", channels, heads), eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, o: Tensor) -> Tensor:
        normed = F.layer_norm(to_float32(o), (self.size,), eps=self.eps).flatten(-2)
        return (normed * self.weight + self.bias).to(o.dtype)


class TimeMixing(Mixer):
    """Mixer whose output needs shifted tokens beside that of the recurrence, for gates and a term of the token itself.

    :meth:`tokens` returns the recurrence and further tensors, :meth:`finish` combines its output with them.
    """

    shards = True

    def tokens(self, x: Tensor, call: CallContext) -> tuple[Recurrence, tuple[Tensor, ...]]:
        """Recurrence of ``x`` [B, T, D], and tensors for :meth:`finish`."""
        raise NotImplementedError

    def finish(self, o: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
        """Map the recurrence's output [B, T, H, V] to [B, T, D]."""
        raise NotImplementedError

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return self.tokens(x, call)[0]

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        """Read as at the start of a sequence, without a token before ``x``."""
        return self.finish(o, self.tokens(x, CallContext(x, returning=False))[1])

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        r, beside = self.tokens(x, call)
        r = r.to(r.v.dtype)  # dtype of the linear maps, chosen by autocast
        return self.finish(self.attend(r.masked(call.valid), call), beside)

    def flops(self, x: Tensor, past: int = 0) -> int:
        with flops.counter() as counter:
            r, beside = self.tokens(x, self.begin(x))
            self.finish(torch.empty_like(r.v), beside)
        return counter.get_total_flops() + self.attend_flops(r, past)


class RWKV(TimeMixing):
    """Time mixing whose initialisation differs from layer to layer."""

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        return place_of(index, count)
