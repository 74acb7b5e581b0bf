"""A mixer is two functions: ``project(x, state) -> Recurrence`` and ``read(o, x) -> y``. The rest is here, once for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from linattn.mixers.carry import Carry, State
from linattn.ops import linear_attention

if TYPE_CHECKING:
    from linattn.mixers.registry import Info


@dataclass(frozen=True)
class Recurrence:
    """What a mixer hands to :func:`linattn.linear_attention`, in its shapes and with its meaning.

    ``skip`` [B, T, H, V] is added to the output of the recurrence (the D of state-space models).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None = None
    beta: Tensor | None = None
    erase: tuple[Tensor, Tensor] | None = None
    bonus: Tensor | None = None
    normalize: bool | float | str = False
    scale: float | None = None
    skip: Tensor | None = None

    def masked(self, valid: Tensor | None) -> Recurrence:
        """The same where tokens outside ``valid`` [B, T] write nothing, fade nothing and erase nothing."""
        if valid is None:
            return self
        token, channel = valid[..., None], valid[..., None, None]  # beside [B, T, H] and [B, T, H, K]
        decay = self.decay
        if decay is not None:
            if decay.ndim <= 2:
                decay = decay.expand(*valid.shape, *decay.shape)
            decay = torch.where(token if decay.ndim == 3 else channel, decay, 0.0)
        return replace(
            self,
            k=torch.where(channel, self.k, 0.0),
            v=torch.where(channel, self.v, 0.0),
            decay=decay,
            beta=None if self.beta is None else torch.where(token, self.beta, 0.0),
            erase=None if self.erase is None else tuple(torch.where(channel, e, 0.0) for e in self.erase),
        )


class Mixer(nn.Module):
    """Base of every sequence mixer: [B, T, D] -> [B, T, D], causal, resumable at any token.

    A linear attention implements :meth:`project` and :meth:`read`. What is no such recurrence (softmax, LSTM) implements
    :meth:`mix` and reads and keeps its state through the carry.
    """

    info: Info

    def project(self, x: Tensor, state: Carry) -> Recurrence:
        """What the tokens ``x`` [B, T, D] write, fade, erase and read."""
        raise NotImplementedError(f"{type(self).__name__} must implement project(x, state) and read(o, x), or mix(x, carry)")

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        """From the output of the recurrence [B, T, H, V] and the tokens back to [B, T, D]."""
        raise NotImplementedError(f"{type(self).__name__} must implement read(o, x)")

    def mix(self, x: Tensor, carry: Carry) -> Tensor:
        """Project, run the recurrence, read."""
        r = self.recurrence(x, carry)
        initial = carry.get("S")
        if initial is not None and r.normalize is not False:
            initial = (initial, carry.get("z"))
        o, state = linear_attention(
            r.q, r.k, r.v, decay=r.decay, beta=r.beta, erase=r.erase, bonus=r.bonus, normalize=r.normalize, scale=r.scale,
            initial_state=initial, return_state=True, cu_seqlens=carry.cu_seqlens,
        )  # fmt: skip
        for name, value in zip(("S", "z"), state if isinstance(state, tuple) else (state,), strict=False):
            carry.keep(name, value)
        return self.read(o if r.skip is None else o + r.skip, x)

    def recurrence(self, x: Tensor, carry: Carry) -> Recurrence:
        """``project`` with padding silenced and, under autocast, with q, k and v in one dtype."""
        r = self.project(x, carry)
        if isinstance(r, tuple):  # a mixer with states of its own may return them beside the recurrence
            r, own = r
            for name, value in (own or {}).items():
                carry.keep(name, value)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else r.v.dtype
        r = replace(r, q=r.q.to(dtype), k=r.k.to(dtype), v=r.v.to(dtype))
        return r.masked(carry.valid)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        return_state: bool = False,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        """Mix ``x`` [B, T, D] along time.

        Args:
            x: tokens [B, T, D].
            state: what an earlier call returned, a dict of tensors with one row a sequence.
            return_state: also return the state after the last real token.
            mask: [B, T] bool, True = real token. Padding writes nothing, fades nothing, shifts nothing; its output is 0.
            cu_seqlens: [N + 1] int: B is 1 and N sequences lie end to end.
        """
        order = None
        lengths = None
        if mask is not None:
            lengths, order = _sorted(mask, x, cu_seqlens)
            x = x.gather(1, order[..., None].expand_as(x))
        carry = Carry(x, state, lengths=lengths, cu_seqlens=cu_seqlens)
        y = self.mix(x, carry)
        if mask is not None:
            y = torch.where(mask[..., None], torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y), 0.0)
        if not return_state:
            return y
        carry.keep("position", carry.start + carry.counts)
        return y, carry.new


def _sorted(mask: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Lengths [B], and the order [B, T] that puts each row's real tokens first and keeps their sequence."""
    if cu_seqlens is not None:
        raise ValueError("mask and cu_seqlens exclude each other: packed sequences have no padding")
    if mask.shape != x.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(f"mask must be torch.bool of shape [B, T] = {list(x.shape[:2])}, but came as {mask.dtype} {list(mask.shape)}")
    return mask.sum(1), torch.argsort(~mask, dim=1, stable=True)
