"""Softmax attention with rotary positions: every token is kept, and looked at again by every later one."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.carry import Carry
from linattn.mixers.parts import head_size, rotate, wide
from linattn.mixers.registry import register


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
)
class Softmax(Mixer):
    """Its state is the cache: keys and values ``k``, ``v`` [rows, slots, kv_heads, K], and which slots are real, ``valid``.

    Every call appends as many slots as it brings tokens. Where rows are of different lengths, some of them are filler, which
    no query sees. Keys are kept rotated, so the order of the slots has no meaning.
    """

    def __init__(self, dim: int, heads: int = 4, *, kv_heads: int | None = None, base: float = 10000.0) -> None:
        super().__init__(dim)
        self.heads, self.kv_heads, self.base = heads, heads if kv_heads is None else kv_heads, base
        self.size = head_size("dim", dim, heads)
        head_size("heads", heads, self.kv_heads)
        if self.size % 2:
            raise ValueError(f"dim must give every head an even number of channels to rotate, but came as {dim} with {heads} heads")
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, self.kv_heads * self.size, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, state: Carry) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (-1, self.size)) for p in (self.q_proj, self.k_proj, self.v_proj))
        channel = torch.arange(0, self.size, 2, dtype=wide(x.new_empty(0)).dtype, device=x.device)
        angles = state.positions[..., None] * self.base ** (-channel / self.size)  # [B, T, K / 2]
        return Recurrence(rotate(q, angles), rotate(k, angles), v)

    def attend(self, r: Recurrence, carry: Carry) -> Tensor:
        if carry.cu_seqlens is not None:
            return self._packed(r, carry)
        k, v, _ = self._cache(r, carry)
        if carry.fresh:  # filler stands behind the real tokens, where causality hides it
            return _softmax(r.q, k, v, None)
        before = cast(Tensor, carry.get("valid"))[:, None].expand(-1, carry.tokens, -1)  # [B, T, slots]
        own = torch.ones(carry.tokens, carry.tokens, dtype=torch.bool, device=k.device).tril()
        return _softmax(r.q, k, v, torch.cat([before, own.expand(carry.batch, -1, -1)], -1)[:, None])

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        pairs = tokens * past + tokens * (tokens + 1) // 2
        return 2 * batch * heads * pairs * (size + r.v.shape[3])

    def _cache(self, r: Recurrence, carry: Carry) -> list[Tensor]:
        """k, v and valid of earlier calls and this one, rows first; keeps them."""
        (k, valid), (v, _) = carry.to_rows(r.k), carry.to_rows(r.v)
        if valid is None:
            valid = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        cache = {"k": k, "v": v, "valid": valid}
        for name, new in cache.items():
            old = carry.get(name)
            cache[name] = new if old is None else torch.cat([old.to(new.dtype), new], 1)
            carry.keep(name, cache[name])
        return list(cache.values())

    def _packed(self, r: Recurrence, carry: Carry) -> Tensor:
        """All sequences in one row of keys, what earlier calls kept first; a query sees its own sequence up to itself."""
        if carry.returning:
            self._cache(r, carry)
        sequence, token = carry.sequence, torch.arange(carry.tokens, device=r.k.device)  # [T]
        seen = (sequence[:, None] == sequence) & (token[:, None] >= token)
        if carry.fresh:
            return _apart(r.q, r.k, r.v, seen)
        old_k, old_v, valid = (cast(Tensor, carry.get(name)) for name in ("k", "v", "valid"))  # [N, slots, ...]
        row = torch.arange(carry.rows, device=token.device)
        before = (sequence[:, None] == row)[..., None] & valid  # [T, N, slots]
        k, v = (torch.cat([old.flatten(0, 1)[None].to(new.dtype), new], 1) for old, new in ((old_k, r.k), (old_v, r.v)))
        return _apart(r.q, k, v, torch.cat([before.flatten(1), seen], 1))


def _apart(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention where ``seen`` [T, slots], with NaN kept to those that see it: a weight of 0 times NaN would be NaN for all."""
    q_bad, k_bad, v_bad = (~t.isfinite().flatten(2).all(-1) for t in (q, k, v))  # [1, T], [1, slots], [1, slots]
    q, k, v = (torch.where(bad[..., None, None], 0.0, t) for t, bad in ((q, q_bad), (k, k_bad), (v, v_bad)))
    hit = q_bad | (seen & (k_bad | v_bad)).any(-1)  # [1, T]
    return torch.where(hit[..., None, None], torch.nan, _softmax(q, k, v, seen))


def _softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Attention of q [B, T, H, K] to k, v [B, slots, Hk, ...] where ``seen`` [..., T, slots]; causal if it is None."""
    group = q.shape[2] // k.shape[2]
    k, v = (t if group == 1 else t.repeat_interleave(group, 2) for t in (k, v))
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen, is_causal=seen is None)
    return o.transpose(1, 2)
