"""Softmax attention with rotary positions: every token is kept and read by all later tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.norms import RMSNorm, ZeroCenteredRMSNorm
from linattn.mixers.parts import ShortConvolution, at_least, head_size, positive, rotate
from linattn.mixers.registry import register
from linattn.mixers.rotary import check_scaling, frequencies, gain
from linattn.mixers.sharded import ShardedContext
from linattn.ops.dot_product import dot_product_attention
from linattn.ops.one_query import one_query

_BLOCK = 64  # minimum of queries per tile under a window
_NORMS: dict[str, type[nn.Module]] = {"zero_centered_rms": ZeroCenteredRMSNorm, "rms": RMSNorm}


@register(
    "softmax",
    title="Softmax attention",
    paper="Attention Is All You Need",
    arxiv="1706.03762",
    year=2017,
    seeds=("000", "001", "002", "003", "004"),
    equation=r"o_t = \sum_{i \le t} \frac{\exp(q_t k_i^\top / \sqrt{d})}{\sum_{j \le t} \exp(q_t k_j^\top / \sqrt{d})}\, v_i",
    recurrent=False,
    oracle="torch scaled_dot_product_attention under a dense mask, and transformers' LlamaAttention",
    chinese={
        "Softmax attention": "softmax 注意力",
        "torch scaled_dot_product_attention under a dense mask": "稠密掩码下的 torch scaled_dot_product_attention",
        "and transformers' LlamaAttention": "以及 transformers 的 LlamaAttention",
    },
)
class Softmax(Mixer):
    """Softmax attention with the cache as state: keys and values ``k``, ``v`` [rows, slots, kv_heads, K], and the mask ``valid``.

    Every call appends as many slots as it brings tokens. Where rows have different lengths, some slots are padding, which
    no query sees. Keys are kept rotated, so the order of the slots has no meaning. In a captured step free slots follow them,
    and ``taken`` [rows] is the number of slots in use.

    With a ``window`` (Longformer, arXiv 2004.05150; Mistral, arXiv 2310.06825) a token sees itself and the window - 1 before it,
    and the state holds only those: ``k``, ``v`` [rows, window - 1, kv_heads K], the latest last, zeros where there was no token.

    The other options are for published models: ``head_dim`` K where it is not dim / heads; only the first ``rotated`` channels of a head
    are rotated (0: none), by frequencies with a ``scaling`` (see :mod:`linattn.mixers.rotary`); ``norm_eps`` puts RMS norms on queries
    and keys before that, of the kind ``norm``, and ``gated`` a sigmoid gate on the output (Qwen3-Next); ``bias`` gives q, k and v
    biases, ``out_bias`` the map behind them; ``scale`` multiplies the scores in place of K ** -0.5 (Gemma). ``conv_width`` puts a short
    convolution and SiLU on q, k and v, as linear attentions have, so that a comparison with them is of attention alone. With
    ``causal=False`` every token sees all of its sequence.
    """

    heads_apart: ClassVar[tuple[str, ...] | None] = ("short_conv: heads kv_heads kv_heads",)

    shards = True

    def __init__(  # noqa: PLR0913  saved configs name these options, and create() and the docs read them in this signature
        self, dim: int, heads: int = 4, *, kv_heads: int | None = None, base: float = 10000.0, window: int | None = None,
        head_dim: int | None = None, rotated: int | None = None, norm_eps: float | None = None, gated: bool = False,
        bias: bool = False, out_bias: bool = False, conv_width: int | None = None, causal: bool = True,
        norm: str = "zero_centered_rms", scale: float | None = None, scaling: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        if conv_width is not None and not causal:
            raise ValueError(f"conv_width must be None with causal=False, since it reads earlier tokens only, but came as {conv_width}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1 token, the query's own, but came as {window}")
        if window is not None and not causal:
            raise ValueError(f"window must be None with causal=False, but came as {window}; the mixer local has two-sided windows")
        self.window, self.causal = window, causal
        self.heads, self.kv_heads, self.base = heads, heads if kv_heads is None else kv_heads, base
        self.size = head_size("dim", dim, heads) if head_dim is None else head_dim
        at_least(1, head_dim=self.size)
        positive(base=base)
        head_size("heads", heads, self.kv_heads)
        if rotated is None and self.size % 2:
            raise ValueError(f"dim must give every head an even number of channels to rotate, but came as {dim} with {heads} heads")
        self.rotated = self.size if rotated is None else rotated
        if self.rotated % 2 or not 0 <= self.rotated <= self.size:
            raise ValueError(f"rotated must be an even number from 0 to a head's {self.size} channels, but came as {rotated}")
        if norm not in _NORMS:
            raise ValueError(f"norm must be one of {', '.join(map(repr, _NORMS))}, but came as {norm!r}")
        if scale is not None:
            positive(scale=scale)
        if scaling is not None:
            check_scaling(scaling)
        self.scale, self.scaling = scale, scaling
        inner = heads * self.size
        self.q_proj = nn.Linear(dim, inner, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(dim, self.kv_heads * self.size, bias=bias) for _ in range(2))
        self.short_conv = None if conv_width is None else ShortConvolution(inner + 2 * self.kv_heads * self.size, conv_width)
        self.g_proj = nn.Linear(dim, inner, bias=bias) if gated else None
        self.q_norm, self.k_norm = (None if norm_eps is None else _NORMS[norm](self.size, norm_eps) for _ in range(2))
        self.o_proj = nn.Linear(inner, dim, bias=out_bias)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        parts = [p(x) for p in (self.q_proj, self.k_proj, self.v_proj)]
        if self.short_conv is not None:
            parts = list(self.short_conv(torch.cat(parts, -1), call).split([part.shape[-1] for part in parts], -1))
        q, k, v = (part.unflatten(-1, (-1, self.size)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.scale is not None:
            q = q * (self.scale * self.size**0.5)  # attention itself divides by the root
        if not self.rotated:
            return Recurrence(q, k, v)
        angles = self.angles(x, call)
        return Recurrence(self._turned(q, angles), self._turned(k, angles), v)

    def angles(self, x: Tensor, call: CallContext) -> Tensor:
        """Rotation angle of each pair of channels, [B, T, rotated / 2]."""
        return call.positions[..., None] * frequencies(x, self.rotated, self.base, self.scaling)

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate the first ``rotated`` channels of each head of x [B, T, H, K]; the others stay."""
        first = rotate(x[..., : self.rotated], angles)
        if (factor := gain(self.scaling)) != 1:
            first = first * factor
        return first if self.rotated == self.size else torch.cat([first, x[..., self.rotated :]], -1)

    @property
    def growing(self) -> tuple[str, ...]:
        own = type(self).attend is Softmax.attend  # a subclass that overrides attend may use its cache differently
        return ("k", "v", "valid") if own and self.window is None and self.causal else ()

    def attend_cache(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, taken: Tensor) -> Tensor:
        """Attend with one query a row, q [B, 1, H, K], to a preallocated cache: see :func:`linattn.ops.one_query.one_query`."""
        return one_query(q, k, v, seen, taken)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        if call.sharded and self.window is None:
            return cast(ShardedContext, call).attend(r.q, r.k, r.v, self.causal, _softmax)
        if self.window is not None:
            return self._windowed(r, call, self.window - 1)
        if call.taken is not None:
            return self._step(r, call, call.taken)
        if call.cu_seqlens is not None:
            return self._packed(r, call)
        if not self.causal:
            real = call.valid
            every = r.k.new_ones(1, r.k.shape[1], dtype=torch.bool) if real is None else real | (call.counts == 0)[:, None]
            return _plain(r.q, r.k, r.v, every[:, None])
        k, v, _ = self._cache(r, call)
        if call.fresh:  # padding follows the real tokens, where causality hides it
            return _softmax(r.q, k, v, None)
        before = cast(Tensor, call.get("valid"))[:, None].expand(-1, call.tokens, -1)  # [B, T, slots]
        own = torch.ones(call.tokens, call.tokens, dtype=torch.bool, device=k.device).tril()
        return _softmax(r.q, k, v, torch.cat([before, own.expand(call.batch, -1, -1)], -1)[:, None])

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        o = o.flatten(-2)
        return self.o_proj(o if self.g_proj is None else o * self.g_proj(x).sigmoid())

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        if not self.causal:
            return 2 * batch * heads * tokens * tokens * (size + r.v.shape[3])
        most = past + tokens if self.window is None else self.window  # largest number of visible tokens
        growing = min(max(most - past, 0), tokens)  # tokens that see one more than the token before
        pairs = growing * past + growing * (growing + 1) // 2 + (tokens - growing) * most
        return 2 * batch * heads * pairs * (size + r.v.shape[3])

    def _cache(self, r: Recurrence, call: CallContext) -> list[Tensor]:
        """Cached k, v and valid of earlier calls and this one, rows first; keeps them."""
        (k, valid), (v, _) = call.to_rows(r.k), call.to_rows(r.v)
        if valid is None:
            valid = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        return [call.append(name, new) for name, new in (("k", k), ("v", v), ("valid", valid))]

    def _step(self, r: Recurrence, call: CallContext, taken: Tensor) -> Tensor:
        """Step of one real token in every row on a preallocated cache."""
        if call.tokens != 1 or call.lengths is not None or call.cu_seqlens is not None:
            raise ValueError("a preallocated state takes one token of every row at a time: it belongs to a captured step")
        k, v, valid = self._cache(r, call)
        call.keep("taken", taken + call.counts)
        return self.attend_cache(r.q, k, v, valid, taken)

    def _packed(self, r: Recurrence, call: CallContext) -> Tensor:
        """Attend with all packed sequences in one row of keys, kept ones first; a query sees its own sequence up to itself."""
        if call.returning:
            self._cache(r, call)
        sequence, token = call.sequence, torch.arange(call.tokens, device=r.k.device)  # [T]
        seen = sequence[:, None] == sequence
        if self.causal:
            seen = seen & (token[:, None] >= token)
        if call.fresh:
            return _apart(r.q, r.k, r.v, seen[None])
        old_k, old_v, valid = (cast(Tensor, call.get(name)) for name in ("k", "v", "valid"))  # [N, slots, ...]
        row = torch.arange(call.rows, device=token.device)
        before = (sequence[:, None] == row)[..., None] & valid  # [T, N, slots]
        k, v = (torch.cat([old.flatten(0, 1)[None].to(new.dtype), new], 1) for old, new in ((old_k, r.k), (old_v, r.v)))
        return _apart(r.q, k, v, torch.cat([before.flatten(1), seen], 1)[None])

    def _windowed(self, r: Recurrence, call: CallContext, n: int) -> Tensor:
        """Attend from every token to itself and the ``n`` before it, some of which earlier calls may have kept."""
        (k, places), (v, _) = (call.context(name, t.flatten(2), n) for name, t in (("k", r.k), ("v", r.v)))
        k, v = k.unflatten(-1, r.k.shape[2:]), v.unflatten(-1, r.v.shape[2:])
        if places is None:
            return _banded(r.q, k, v, call.positions, n, _plain)
        q, past = (t.new_zeros(t.shape[0], k.shape[1], *t.shape[2:]).index_copy(1, places, t) for t in (r.q, call.positions))
        k, v = (F.pad(t, (0, 0, 0, 0, n, 0)) for t in (k, v))
        return _banded(q, k, v, past, n, _apart).index_select(1, places)


def _banded(q: Tensor, k: Tensor, v: Tensor, past: Tensor, n: int, attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Attention of query i of q [B, L, H, K] to the slots i to i + n of k, v [B, n + L, Hk, ...], the last of which is its own, and to no
    more than ``past`` [B, L] slots before that one.

    In blocks of queries, each beside the keys that it may need, so that time and memory grow with L (n + block).
    """
    length = q.shape[1]
    size = max(min(length, max(n, _BLOCK)), 1)
    count = max(-(-length // size), 1)
    fill = count * size - length
    q, k, v = (F.pad(t, (0, 0, 0, 0, 0, fill)) for t in (q, k, v))
    q = q.unflatten(1, (count, size)).flatten(0, 1)  # [B count, size, H, K]
    k, v = (t.unfold(1, n + size, size).movedim(-1, 2).flatten(0, 1) for t in (k, v))  # [B count, n + size, Hk, ...]
    token, slot = torch.arange(size, device=q.device), torch.arange(n + size, device=q.device)
    age = (token + n)[:, None] - slot  # [size, n + size]: by how much a slot is older than the query
    seen = (age >= 0) & (age <= F.pad(past, (0, fill)).clamp(max=n).reshape(-1, size, 1))
    return attention(q, k, v, seen).unflatten(0, (-1, count)).flatten(1, 2)[:, :length]


def _plain(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention where ``seen`` [B, T, slots]."""
    return _softmax(q, k, v, seen[:, None])


def _apart(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """:meth:`_plain` with NaN confined to the tokens that see it: a weight of 0 times NaN would reach all."""
    q_bad, k_bad, v_bad = (~t.isfinite().flatten(2).all(-1) for t in (q, k, v))  # [B, T], [B, slots], [B, slots]
    q, k, v = (torch.where(bad[..., None, None], 0.0, t) for t, bad in ((q, q_bad), (k, k_bad), (v, v_bad)))
    hit = q_bad | (seen & (k_bad | v_bad)[:, None]).any(-1)  # [B, T]
    return torch.where(hit[..., None, None], torch.nan, _plain(q, k, v, seen))


def _softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Attention of q [B, T, H, K] to k, v [B, slots, Hk, ...] where ``seen`` [..., T, slots]; causal if it is None."""
    group = q.shape[2] // k.shape[2]
    shares = group > 1 and q.device.type == "cpu"  # on a GPU torch would store all scores with a mask
    if not shares and group > 1:
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=shares).transpose(1, 2)
