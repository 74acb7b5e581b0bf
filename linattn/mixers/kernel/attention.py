"""Base of kernel attention: φ(q_t) S_t / (φ(q_t) z_t), causal or over all tokens, and exponentials that never overflow."""

from __future__ import annotations

from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import head_size, to_float32
from linattn.ops import diagonal_scan, running_max

NOTHING = -1e30  # logarithm of an empty sum: below every gate, and finite, so that differences are not NaN


class KernelAttention(Mixer):
    """Linear attention by a feature map: a subclass implements :meth:`features` and, with ``normalize = "return"``, :meth:`guard`.

    ``causal=False`` lets every token read all tokens of its sequence, as an encoder does.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        causal: True lets a token see earlier ones and itself, False all.
        feature_dim: channels of each head's queries and keys before the feature map; those of the values if None.
        bias: adds biases to the projections of queries, keys and values.
        out_bias: adds a bias to the last projection; as ``bias`` if None.
    """

    heads_apart: ClassVar[tuple[str, ...] | None] = ()

    shards = True

    normalize: float | str = 1e-6

    def __init__(
        self,
        dim: int,
        heads: int,
        causal: bool,
        *,
        feature_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
    ) -> None:
        super().__init__(dim)
        size = head_size("dim", dim, heads)
        self.heads, self.causal = heads, causal
        self.feature_dim = size if feature_dim is None else feature_dim
        if self.feature_dim < 1:
            raise ValueError(f"feature_dim must be at least 1, but came as {feature_dim}")
        self.q_proj, self.k_proj = (nn.Linear(dim, heads * self.feature_dim, bias=bias) for _ in range(2))
        self.v_proj = nn.Linear(dim, dim, bias=bias)
        self.o_proj = nn.Linear(dim, dim, bias=bias if out_bias is None else out_bias)

    def heads_of(self, x: Tensor) -> list[Tensor]:
        """q, k [B, T, H, K] in float32 (float64 for float64) and v [B, T, H, V]."""
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return [to_float32(q), to_float32(k), v]

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        """Feature map φ of queries and of keys."""
        raise NotImplementedError(f"{type(self).__name__} must implement features(q, k, call) or project(x, call)")

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.heads_of(x)
        q, k = self.features(q, k, call)
        return Recurrence(q, k, v, normalize=self.normalize, scale=1.0)

    def guard(self, denominator: Tensor) -> Tensor:
        """Denominator in place of φ(q_t) z_t, [B, T, H]."""
        return denominator

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        o = cast("Tensor | tuple[Tensor, Tensor]", super().attend(r, call))  # a pair where r.normalize is "return"
        if isinstance(o, Tensor):
            return o
        o, denominator = o
        return (to_float32(o) / self.guard(denominator)[..., None]).to(o.dtype)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))


def maximum_so_far(x: Tensor, call: CallContext, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Largest x [B, T, D] of each sequence before each token, up to it, and in all: [B, T, D] twice and [rows, D].

    The last is kept under ``name``.
    """
    x = only_real(to_float32(x), call)
    first = _first(x, call, name)
    m, last = running_max(x.new_zeros(x.shape[-1]), x, initial_state=first, return_state=True, cu_seqlens=call.cu_seqlens)
    call.keep(name, last)
    return call.shifted(m, first), m, last


def logsumexp_so_far(x: Tensor, call: CallContext, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Running L_t = log Σ_{i ≤ t} exp(x_i) like :func:`maximum_so_far`, differentiable; :data:`NOTHING` before the first token."""
    x = only_real(to_float32(x), call)
    first, cu = _first(x, call, name), call.cu_seqlens
    start = first.detach()
    m, m_last = running_max(x.new_zeros(x.shape[-1]), x.detach(), initial_state=start, return_state=True, cu_seqlens=cu)
    total = torch.where(start > NOTHING / 2, (first - start).exp(), 0.0)
    fade = log_fading(call.shifted(m, start), m)
    total, total_last = diagonal_scan(fade, (x - m).exp(), initial_state=total, return_state=True, cu_seqlens=cu)
    log, last = m + total.log(), m_last + total_last.clamp_min(torch.finfo(x.dtype).tiny).log()  # 0 where there is no token
    call.keep(name, last)
    return call.shifted(log, first), log, last


def log_fading(before: Tensor, now: Tensor) -> Tensor:
    """Log decay from sums in units of exp(before) to units of exp(now); 0 at the start, where the state is empty."""
    return torch.where(before > NOTHING / 2, before - now, 0.0).clamp(max=0.0)  # rounding may exceed 0


def to_tokens(rows: Tensor, call: CallContext) -> Tensor:
    """Expand one vector per sequence, [rows, D], to its tokens: [B, 1, D], packed [1, T, D]."""
    return call.to_tokens(rows)


def only_real(x: Tensor, call: CallContext) -> Tensor:
    """Logarithms x [B, T, D] with :data:`NOTHING` in place of padding."""
    valid = call.valid
    return x if valid is None else torch.where(valid[..., None], x, NOTHING)


def _first(x: Tensor, call: CallContext, name: str) -> Tensor:
    old = call.get(name)
    return x.new_full((call.rows, x.shape[-1]), NOTHING) if old is None else old.to(x.dtype)
