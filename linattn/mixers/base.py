"""Base class of mixers: a mixer implements ``project(x, call) -> Recurrence`` and ``read(o, x) -> y``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from linattn.mixers.context import CallContext, State, from_front, to_front
from linattn.mixers.fault import explain_failure
from linattn.mixers.sharded import ShardedContext
from linattn.ops import flops, linear_attention, sharding
from linattn.ops.checks import flag, packed_lengths, tensor, values_visible
from linattn.ops.inputs import Form, Terms

if TYPE_CHECKING:
    from linattn.mixers.registry import Info


@dataclass(frozen=True)
class Recurrence(Terms):
    """Arguments of :func:`linattn.linear_attention`, with its shapes and meanings, as a mixer's ``project`` returns them.

    ``skip`` [B, T, H, V] is added to the output of the recurrence (the D of state-space models).
    """

    skip: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Recurrence:
        """Copy with q, k, v and erase in ``dtype``, for which kernels are made; decay, beta and bonus keep their dtype."""
        erase = self.erase and (self.erase[0].to(dtype), self.erase[1].to(dtype))
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype), erase=erase)

    def masked(self, valid: Tensor | None) -> Recurrence:
        """Copy in which tokens outside ``valid`` [B, T] do not write, decay or erase."""
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
    """Base of sequence mixers: [B, T, D] -> [B, T, D], causal, resumable at any token; :mod:`linattn.mixers.kinds` has the other kinds.

    A linear attention implements :meth:`project` and :meth:`read`. A mixer without the recurrence replaces :meth:`attend`
    (softmax); a mixer without queries, keys and values replaces :meth:`mix` (LSTM). If ``causal`` is false every token may read
    its whole sequence, as in an encoder; there is no state, and a given one is refused.
    """

    info: ClassVar[Info]
    keep_float32: ClassVar[tuple[str, ...]] = ()  # own parameters that stay at least float32 in every conversion: time constants
    gates: ClassVar[tuple[str, ...]] = (  # names of own linear maps for decays and write strengths, which are not quantised
        "decay_proj", "dt_proj", "a_proj", "b_proj", "beta_proj", "f_proj", "i_proj", "gates_proj", "rate_proj", "tau_proj", "level_proj",
    )  # fmt: skip
    shares: ClassVar[bool] = False  # layers of this kind pass a tensor up through the model: see ``forward``
    adds_loss: ClassVar[bool] = False  # adds auxiliary losses, see ``linattn.ffn.reports``
    packs: ClassVar[bool] = True  # ``mix`` supports packed sequences; otherwise it gets each as a row
    shards: ClassVar[bool | None] = None  # the class's own ``mix`` and ``attend`` run under context parallelism; None: unknown
    # Each head's part of every projection stands on its own, so processes can share the heads (:mod:`linattn.parallel.heads`): the
    # fused projections, each with the attributes that size its sections, such as "qkv_proj: keys keys values". None: it does not.
    heads_apart: ClassVar[tuple[str, ...] | None] = None
    causal: bool = True  # set by ``register``, and by mixers that support both
    form: Form = "auto"  # of the recurrence: "parallel", "chunk" or "recurrent"; results are equal
    piece: int | None = None  # tokens per block where scores are held for each; results are equal

    dim: int | None = None  # the model's width; set by ``create`` if the mixer does not set it

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        if dim is not None:
            self.dim = dim

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        """Default options of layer ``index``, from 0, of ``count`` layers of this kind in a model; its config overrides them."""
        return {}

    @property
    def growing(self) -> tuple[str, ...]:
        """Names of states with a slot per token, [rows, slots, ...], which may be preallocated: see :meth:`CallContext.append`."""
        return ()

    def project(self, x: Tensor, call: CallContext) -> Recurrence | tuple[Recurrence, State]:
        """Project the tokens ``x`` [B, T, D] to the arguments of the recurrence; optionally also return the mixer's own states."""
        raise NotImplementedError(f"{type(self).__name__} must implement project(x, call) and read(o, x), or mix(x, call)")

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        """Map the recurrence's output [B, T, H, V] and the tokens to [B, T, D]."""
        raise NotImplementedError(f"{type(self).__name__} must implement read(o, x)")

    def recurrence(self, x: Tensor, call: CallContext) -> Recurrence:
        """Run :meth:`project` and mask padding; q, k, v and erase in the dtype of ``x``, under autocast in autocast's."""
        projected = self.project(x, call)
        if isinstance(projected, tuple):
            projected, own = projected
            for name, value in own.items():
                call.keep(name, value)
        dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
        return projected.to(dtype).masked(call.written)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        """Run the recurrence from the incoming state; returns the output [B, T, H, V] and keeps the state after it."""
        s = call.get("S")
        initial = s if s is None or r.normalize is False else (s, cast(Tensor, call.get("z")))
        o = linear_attention(
            r.q, r.k, r.v, decay=r.decay, beta=r.beta, erase=r.erase, bonus=r.bonus, normalize=r.normalize, scale=r.scale,
            causal=self.causal, initial_state=initial, return_state=call.returning, cu_seqlens=call.cu_seqlens, form=self.form,
        )  # fmt: skip
        if call.returning:
            o, state = o
            for name, value in zip(("S", "z"), state if isinstance(state, tuple) else (state,), strict=False):
                call.keep(name, value)
        return o

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        """Project, run the recurrence, read: [B, T, D] -> [B, T, D]."""
        r = self.recurrence(x, call)
        o = self.attend(r, call)
        return self.read(o if r.skip is None else (o + r.skip).to(o.dtype), x)

    def arguments(self, x: Tensor) -> tuple[Any, ...]:
        """Default arguments of a call for tokens ``x`` [B, T, D], for which costs are computed."""
        return (x,)

    def begin(self, x: Tensor, *others: Any) -> CallContext:
        """Call context of ``mixer(x, *others)``, with ``others`` as in :meth:`arguments`."""
        return CallContext(x, returning=False, shared=self.example_shared(x))

    def example_shared(self, x: Tensor) -> Tensor | None:
        """Make a tensor like the one that the first layer of this kind passes to this layer for ``x`` [B, T, D]; None if it needs none."""
        return None

    def flops(self, x: Tensor, past: int = 0) -> int:
        """Multiplications and additions of mixing ``x`` [B, T, D] after ``past`` tokens; see :func:`linattn.cost`.

        If the mixer replaces :meth:`mix`, its operations are counted while it runs.
        """
        if type(self).mix is not Mixer.mix:
            return self.counted(x)
        with flops.counter() as counter:
            r = self.recurrence(x, self.begin(*self.arguments(x)))
            heads = max(r.q.shape[2], r.v.shape[2])
            self.read(r.v.new_empty(*x.shape[:2], heads, r.v.shape[3]), x)
        return counter.get_total_flops() + self.attend_flops(r, past)

    def counted(self, x: Tensor) -> int:
        """Count the operations of a call with tokens ``x`` [B, T, D] and no state while it runs."""
        with flops.counter() as counter:
            self(*self.arguments(x))
        return counter.get_total_flops()

    def attend_flops(self, r: Recurrence, past: int) -> int:
        """Operations of :meth:`attend`: those of every token on every entry of its head's state."""
        batch, tokens, heads, size = r.v.shape
        extra = sum(n for n, given in ((1, r.decay), (4, r.beta), (4, r.erase), (2, r.bonus)) if given is not None)
        return batch * tokens * heads * r.k.shape[3] * size * (4 + extra)  # 2 to write kᵀv, 2 to read q S

    @explain_failure
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
            state: state returned by an earlier call, a dict of tensors with one row a sequence.
            return_state: also return the state after the last real token.
            mask: [B, T] bool, True = real token. Padding does not write, decay or shift; its output is 0. Or the number of
                real tokens of each row, [B] int64: those at its front.
            cu_seqlens: [N + 1] int: B is 1 and N sequences lie end to end; the state has N rows.
            shared: tensor from the last layer of this kind, for the same tokens, mask and cu_seqlens; None for the first layer.
            return_shared: return the triple (y, state or None, tensor for the next layer), of a mixer that ``shares``.

        Raises:
            ValueError: for a wrong shape, for a state of another mixer, for ``mask`` with ``cu_seqlens``, and for a given or requested
                state if ``causal`` is false.
        """
        self.check_width("x", x)
        flag("return_state", return_state)
        if not self.causal and (return_state or state is not None):
            raise ValueError("causal=False has no state, because every token reads all tokens of the call")
        if (layout := sharding.active()) is not None:
            self.check_sharded(mask, cu_seqlens)
            call: CallContext = ShardedContext(layout, x, state, returning=return_state, shared=shared)
            y = self.mix(x, call)
        elif mask is not None:
            y, call = self._mix_real(x, mask, state, return_state, cu_seqlens, shared)
        else:
            if cu_seqlens is not None:
                packed_lengths(cu_seqlens, x)
            if cu_seqlens is not None and not self.packs:
                y, call = self._mix_apart(x, state, return_state, cu_seqlens, shared)
            else:
                call = CallContext(x, state, cu_seqlens=cu_seqlens, returning=return_state, shared=shared)
                y = self.mix(x, call)
        call.keep("position", call.start + call.counts if return_state else None)
        if return_shared:
            return y, call.new if return_state else None, call.shared
        return (y, call.new) if return_state else y

    def _mix_real(
        self, x: Tensor, mask: Tensor, state: State | None, returning: bool, cu: Tensor | None, shared: Tensor | None
    ) -> tuple[Tensor, CallContext]:
        """Move each row's real tokens to its front, mix them, and move the outputs back."""
        if cu is not None:
            raise ValueError("mask and cu_seqlens exclude each other: packed sequences have no padding")
        if mask.ndim == 1 and mask.dtype == torch.int64:
            real = (torch.arange(x.shape[1], device=x.device) < mask[:, None])[..., None]
            x = torch.where(real, x, 0.0)
            call = CallContext(x, state, lengths=mask, returning=returning, shared=shared)
            return torch.where(real, self.mix(x, call), 0.0), call
        front, order = to_front(x, mask)
        call = CallContext(x, state, lengths=mask.sum(1), returning=returning, shared=shared)
        return from_front(self.mix(front, call), mask, order), call

    def _mix_apart(self, x: Tensor, state: State | None, returning: bool, cu: Tensor, shared: Tensor | None) -> tuple[Tensor, CallContext]:
        """Mix packed sequences as rows; if the longest length cannot be read, rows are as long as all sequences together."""
        layout = CallContext(x, cu_seqlens=cu)
        longest = int(layout.counts.amax()) if layout.rows and values_visible(cu) else layout.tokens
        rows = layout.to_rows(x)[0][:, :longest]
        call = CallContext(rows, state, lengths=layout.counts, returning=returning, shared=shared)
        return layout.from_rows(self.mix(rows, call)), call

    def check_sharded(self, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> None:
        """Raise NotImplementedError or ValueError for calls that context parallelism does not support: see :attr:`shards`."""
        if not self._shards():
            name = self.info.name if hasattr(type(self), "info") else type(self).__name__
            raise NotImplementedError(f"{name} does not run under context_parallel: it has no form for a sequence split over processes")
        if mask is not None:
            raise ValueError("mask cannot be used under context_parallel: pack the real tokens and give cu_seqlens to Layout.of")
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens cannot be given under context_parallel: give those of the whole sequence to Layout.of")

    def _shards(self) -> bool:
        """True if ``mix`` and ``attend`` are the base's, or defined by a class that sets :attr:`shards` or whose subclasses do."""
        cls = type(self)
        owners = [next(c for c in cls.__mro__ if name in vars(c)) for name in ("mix", "attend")]
        saying = [c for c in cls.__mro__ if vars(c).get("shards")]
        if cls.shards is False or not (self.causal or saying):  # bidirectional mixers may sum over all tokens anywhere
            return False
        return all(owner is Mixer or any(issubclass(c, owner) for c in saying) for owner in owners)

    def check_width(self, name: str, x: Tensor) -> None:
        """Raise ValueError unless ``x`` is floating point [B, T, D] of the mixer's width."""
        if not tensor(name, x).is_floating_point():
            raise ValueError(f"{name} must be floating point, but came as {x.dtype}")
        if x.ndim != 3 or (self.dim is not None and x.shape[2] != self.dim):
            raise ValueError(f"{name} must have shape [B, T, D] with D = {self.dim}, but came with {list(x.shape)}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mixer:
        """Apply ``fn`` as ``.to`` and ``.bfloat16()`` do; parameters in ``keep_float32`` move but stay at least float32."""
        own = [t for name in self.keep_float32 if (t := getattr(self, name)) is not None]
        kept = [*own, *(p.grad for p in own if p.grad is not None)]

        def keeping_float32(t: Tensor) -> Tensor:
            new = fn(t)
            if new.dtype in (torch.float32, torch.float64) or not any(t is k for k in kept):
                return new
            return t.to(new.device, torch.float32)

        return super()._apply(keeping_float32, recurse)
