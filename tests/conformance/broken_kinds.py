"""Correct and defective mixers of the other kinds; listed in ``FAILS`` too."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers import CallContext, CrossMixer, FeedForward, GridMixer, Mixer, Recurrence, Resampler
from linattn.mixers.registry import info
from tests.conformance.broken import fails


def entry(cls: type[Mixer], kind: str, **changes: object) -> None:
    name = cls.__name__.lower()
    cls.info = replace(info("gla"), name=name, title=name, cls=cls, kind=kind, causal=False, **changes)


class Attention(Mixer):
    """Queries, keys and values, and softmax over all."""

    causal = False
    packs = False

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__(dim)
        self.heads = heads
        self.q_proj, self.kv_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        source = x if call.across is None else call.across.tokens
        k, v = self.kv_proj(source).unflatten(-1, (2, self.heads, -1)).unbind(2)
        return Recurrence(self.q_proj(x).unflatten(-1, (self.heads, -1)), k, v)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        k, v, real = r.k, r.v, call.written
        if real is None:
            real = torch.ones(k.shape[:2], dtype=torch.bool)
        if call.across is not None and not call.fresh:
            k, v, real = call.get("k"), call.get("v"), call.get("real")
        for name, t in (("k", k), ("v", v), ("real", real)):
            call.keep(name, t)
        real = real | ~real.any(1, keepdim=True)
        seen = self.seen(real[:, None, None].expand(-1, 1, r.q.shape[1], -1))
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (r.q, k, v)), attn_mask=seen).transpose(1, 2)

    def seen(self, real: Tensor) -> Tensor:
        """Mask of the real keys that a query sees, [B, 1, T, S]."""
        return real

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        return 4 * batch * heads * tokens * r.k.shape[1] * size

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))


class SoundBothWays(Attention):
    """Nothing is wrong here."""


entry(SoundBothWays, "sequence", growth="n^2", symmetry="permutation")


@fails("padding", "packed")
class SeesPadding(SoundBothWays):
    """Padding is zero, but visible."""

    def seen(self, real: Tensor) -> Tensor:
        return torch.ones_like(real)


@fails("reach", "symmetry")
class CausalInTruth(SoundBothWays):
    """A token sees only earlier ones."""

    def seen(self, real: Tensor) -> Tensor:
        return real & torch.ones(real.shape[2:], dtype=torch.bool).tril()


@fails("growth")
class SaysLinear(SoundBothWays):
    """Claims a lower cost."""


SaysLinear.info = replace(SaysLinear.info, growth="n")


@fails("growth")
class HidesTheCost(SoundBothWays):
    """Omits its scores in the cost sheet."""

    def attend_flops(self, r: Recurrence, past: int) -> int:
        return 0


HidesTheCost.info = replace(HidesTheCost.info, growth="n")


@fails("symmetry")
class KnowsPositions(SoundBothWays):
    """Claims to commute with permutations."""

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return super().project(x + call.positions[..., None].to(x.dtype).sin(), call)


@fails("no_state")
class TakesAnyState(SoundBothWays):
    """A state is ignored, and an empty one returned."""

    def forward(self, x, state=None, *, return_state=False, mask=None, cu_seqlens=None):
        y = super().forward(x, mask=mask, cu_seqlens=cu_seqlens)
        return (y, {}) if return_state else y


@fails("loaded", "seed")
class KeepsWeightsToItself(SoundBothWays):
    """A factor is missing in its state_dict."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.hidden = torch.rand(dim, generator=_generator, dtype=torch.float64)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return super().read(o, x) * self.hidden.to(o.dtype)


_generator = torch.Generator()


@fails("rows", "padding", "packed")
class MixesRows(SoundBothWays):
    """Normalised with statistics of the batch."""

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return super().read(o - o.mean(0, keepdim=True) / 10, x)


class SoundAcross(Attention, CrossMixer):
    """Nothing is wrong here."""


entry(SoundAcross, "cross", growth="n^2")


@fails("padding")
class SeesPaddingOfTheContext(SoundAcross):
    """The mask of the context is ignored."""

    def seen(self, real: Tensor) -> Tensor:
        return torch.ones_like(real)


@fails("pieces")
class ForgetsTheContext(SoundAcross):
    """Keeps detached keys."""

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        o = super().attend(r, call)
        call.new = {name: t.detach() for name, t in call.new.items()}
        return o


class SoundGrid(Attention, GridMixer):
    """Nothing is wrong here: rows of a grid are added up, then all see all."""

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        assert call.grid is not None
        rows = x.unflatten(1, call.grid)
        return super().project((rows + rows.mean(2, keepdim=True)).flatten(1, 2) if x.numel() else x, call)


entry(SoundGrid, "grid", growth="n^2")


@fails("grid")
class WantsSquares(SoundGrid):
    """Uses the square root of the number of tokens as the height."""

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        side = int(x.shape[1] ** 0.5)
        call.grid = (side, x.shape[1] // side)
        return super().project(x, call)


class SoundHalving(Resampler):
    """Nothing is wrong here: pairs of tokens are added up."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.proj = nn.Linear(dim, dim, bias=False)

    def resampled(self, lengths):
        return (lengths + 1) // 2

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        return self.proj(F.pad(x, (0, 0, 0, x.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2))


entry(SoundHalving, "resample", symmetry=None, exemptions={"resample.reach": "a token that comes out is of two that came in"})


@fails("padding")
class RoundsDown(SoundHalving):
    """For odd lengths the mask lacks a token, whose output is zeroed."""

    def forward(self, x, mask=None):
        y, real = super().forward(x, mask)
        return y, None if real is None else real & F.pad(real[:, 1:], (0, 1))


class SoundFeedForward(FeedForward):
    """Nothing is wrong here."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


entry(SoundFeedForward, "feed-forward", linear_in_values=False)


@fails("leading")
class WantsBatches(SoundFeedForward):
    """Accepts only two leading axes."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.ndim == 3
        return super().forward(x)
