"""A mixer is two functions: ``project(x, state) -> Recurrence`` and ``read(o, x) -> y``. The rest is here, once for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from linattn.mixers.carry import Carry, State
from linattn.ops import flops, linear_attention
from linattn.ops.checks import packed_lengths

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
            erase=None if self.erase is None else (torch.where(channel, self.erase[0], 0.0), torch.where(channel, self.erase[1], 0.0)),
        )


class Mixer(nn.Module):
    """Base of every sequence mixer: [B, T, D] -> [B, T, D], causal, resumable at any token.

    A linear attention implements :meth:`project` and :meth:`read`. One whose tokens mix by something else than the
    recurrence replaces :meth:`attend` (softmax), and what has no queries, keys and values replaces :meth:`mix` (LSTM).
    """

    info: ClassVar[Info]
    keep_float32: ClassVar[tuple[str, ...]] = ()  # own parameters that no conversion takes below float32: time constants
    shares: ClassVar[bool] = False  # whether layers of this kind pass a tensor on, up through a model: see ``forward``
    form: str = "auto"  # of the recurrence: "parallel", "chunk" or "recurrent"; the same numbers

    dim: int | None = None  # the model's width; ``create`` fills it in where a mixer does not

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        if dim is not None:
            self.dim = dim

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        """Options of the layer that is number ``index``, from 0, of ``count`` layers of this kind in a model; those of its config win."""
        return {}

    def project(self, x: Tensor, state: Carry) -> Recurrence | tuple[Recurrence, State]:
        """What the tokens ``x`` [B, T, D] write, fade, erase and read; beside it, if there are any, states of one's own."""
        raise NotImplementedError(f"{type(self).__name__} must implement project(x, state) and read(o, x), or mix(x, carry)")

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        """From the output of the recurrence [B, T, H, V] and the tokens back to [B, T, D]."""
        raise NotImplementedError(f"{type(self).__name__} must implement read(o, x)")

    def recurrence(self, x: Tensor, carry: Carry) -> Recurrence:
        """:meth:`project` with padding silenced and q, k and v in the dtype of ``x``, under autocast in that of autocast."""
        projected = self.project(x, carry)
        if isinstance(projected, tuple):
            projected, own = projected
            for name, value in own.items():
                carry.keep(name, value)
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
        q, k, v = (t.to(dtype) for t in (projected.q, projected.k, projected.v))
        return replace(projected, q=q, k=k, v=v).masked(carry.valid)

    def attend(self, r: Recurrence, carry: Carry) -> Tensor:
        """Run the recurrence from the state that came in: the output [B, T, H, V]; keeps the state after it."""
        s = carry.get("S")
        initial = s if s is None or r.normalize is False else (s, cast(Tensor, carry.get("z")))
        o = linear_attention(
            r.q, r.k, r.v, decay=r.decay, beta=r.beta, erase=r.erase, bonus=r.bonus, normalize=r.normalize, scale=r.scale,
            initial_state=initial, return_state=carry.returning, cu_seqlens=carry.cu_seqlens, form=self.form,
        )  # fmt: skip
        if carry.returning:
            o, state = o
            for name, value in zip(("S", "z"), state if isinstance(state, tuple) else (state,), strict=False):
                carry.keep(name, value)
        return o

    def mix(self, x: Tensor, carry: Carry) -> Tensor:
        """Project, run the recurrence, read: [B, T, D] -> [B, T, D]."""
        r = self.recurrence(x, carry)
        o = self.attend(r, carry)
        return self.read(o if r.skip is None else (o + r.skip).to(o.dtype), x)

    def flops(self, x: Tensor, past: int = 0) -> int:
        """Multiplications and additions of mixing ``x`` [B, T, D] after ``past`` tokens; see :func:`linattn.cost`."""
        with flops.counter() as counter:
            r = self.recurrence(x, Carry(x, returning=False))
            heads = max(r.q.shape[2], r.v.shape[2])
            self.read(r.v.new_empty(*x.shape[:2], heads, r.v.shape[3]), x)
        return counter.get_total_flops() + self.attend_flops(r, past)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        """Those of :meth:`attend`: what every token does to every entry of its head's state."""
        batch, tokens, heads, size = r.v.shape
        extra = sum(n for n, given in ((1, r.decay), (4, r.beta), (4, r.erase), (2, r.bonus)) if given is not None)
        return batch * tokens * heads * r.k.shape[3] * size * (4 + extra)  # 2 to write kᵀv, 2 to read q S

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        return_state: bool = False,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        shared: Tensor | None = None,
        return_shared: bool = False,
    ) -> Tensor | tuple[Tensor, State] | tuple[Tensor, State | None, Tensor | None]:
        """Mix ``x`` [B, T, D] along time.

        Args:
            x: tokens [B, T, D]; T may be 0, and T = 1 with a state is a decoding step.
            state: what an earlier call returned, a dict of tensors with one row a sequence.
            return_state: also return the state after the last real token.
            mask: [B, T] bool, True = real token. Padding writes nothing, fades nothing, shifts nothing; its output is 0.
            cu_seqlens: [N + 1] int: B is 1 and N sequences lie end to end; the state has N rows.
            shared: what the last layer of this kind passed on for the same tokens, mask and cu_seqlens; None for the first layer.
            return_shared: return the triple (y, state or None, what is passed on): a mixer that ``shares`` has it.

        Raises:
            ValueError: for a shape that does not fit, for a state of another mixer, and for ``mask`` with ``cu_seqlens``.
        """
        if x.ndim != 3 or (self.dim is not None and x.shape[2] != self.dim):
            raise ValueError(f"x must have shape [B, T, D] with D = {self.dim}, but came with {list(x.shape)}")
        if mask is not None:
            y, carry = self._mix_real(x, mask, state, return_state, cu_seqlens, shared)
        else:
            if cu_seqlens is not None:
                packed_lengths(cu_seqlens, x)
            carry = Carry(x, state, cu_seqlens=cu_seqlens, returning=return_state, shared=shared)
            y = self.mix(x, carry)
        carry.keep("position", carry.start + carry.counts if return_state else None)
        if return_shared:
            return y, carry.new if return_state else None, carry.shared
        return (y, carry.new) if return_state else y

    def _mix_real(
        self, x: Tensor, mask: Tensor, state: State | None, returning: bool, cu: Tensor | None, shared: Tensor | None
    ) -> tuple[Tensor, Carry]:
        """Mix each row's real tokens, moved to its front with zeros behind them, and put the outputs back in their places."""
        if cu is not None:
            raise ValueError("mask and cu_seqlens exclude each other: packed sequences have no padding")
        if mask.shape != x.shape[:2] or mask.dtype != torch.bool:
            raise ValueError(f"mask must be torch.bool of shape [B, T] = {list(x.shape[:2])}, but came as {mask.dtype} {list(mask.shape)}")
        order = torch.argsort(~mask, dim=1, stable=True)[..., None]  # [B, T, 1]
        carry = Carry(x, state, lengths=mask.sum(1), returning=returning, shared=shared)
        front = torch.where(cast(Tensor, carry.valid)[..., None], x.gather(1, order.expand_as(x)), 0.0)
        y = self.mix(front, carry)
        return torch.where(mask[..., None], torch.zeros_like(y).scatter(1, order.expand_as(y), y), 0.0), carry

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mixer:
        """What ``.to``, ``.bfloat16()`` and their like call: parameters in ``keep_float32`` move, but stay wide."""
        own = [t for name in self.keep_float32 if (t := getattr(self, name)) is not None]
        kept = [*own, *(p.grad for p in own if p.grad is not None)]

        def wide(t: Tensor) -> Tensor:
            new = fn(t)
            if new.dtype in (torch.float32, torch.float64) or not any(t is k for k in kept):
                return new
            return t.to(new.device, torch.float32)

        return super()._apply(wide, recurse)
