"""Longformer (arXiv 2004.05150): sliding windows, some dilated, and a few tokens that see all and are seen by all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.pattern.attention import PatternAttention, check_groups
from linattn.mixers.registry import register
from linattn.ops.pattern import First, Pattern, local
from linattn.ops.tiles import Tiles, attention


@dataclass(frozen=True, kw_only=True)
class Globals(Recurrence):
    """``queries`` [B, g, H, K] of the global tokens; ``keys`` and ``values`` [B, T, H, K] of all, as these see them."""

    queries: Tensor
    keys: Tensor
    values: Tensor


@register(
    "longformer",
    title="Longformer",
    paper="Longformer: The Long-Document Transformer",
    arxiv="2004.05150",
    year=2020,
    seeds=("001",),
    equation=r"o_t = \sum_{i \in N(t)} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big) v_i,\quad"
    r" N(t) = \{\, |t - i| \le w\delta,\ \delta \mid t - i \,\} \cup \{\, i < g \,\},\quad N(t) = \text{all for } t < g",
    linear_in_values=False,  # global tokens have their own projection of values
    oracle="transformers, LongformerSelfAttention; with gaps the quadratic formula in float64",
    families=("fixed patterns", "combined patterns", "neural memory"),
    chinese={"with gaps the quadratic formula in float64": "带间隔时用 float64 下的平方形式公式"},
)
class Longformer(PatternAttention):
    """``window`` = w tokens to each side (the paper's and transformers' window is 2 w), δ apart: ``dilations`` has the δ of each of as
    many equal groups of heads. The first ``global_tokens`` = g tokens attend with queries, keys and values of their own.

    As in the paper the causal model has windows alone: g must be 0, and is by default; without causality it is 1 by default.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, window: int = 256, dilations: Sequence[int] = (1,), global_tokens: int | None = None,
        causal: bool = True, rotary: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, causal=causal, rotary=rotary, bias=True)
        check_groups("dilations", dilations, heads)
        count = (0 if causal else 1) if global_tokens is None else global_tokens
        if count < 0 or (causal and count):
            raise ValueError(f"global_tokens must be at least 0, and 0 if causal, since they read later tokens, but came as {count}")
        self.global_tokens = count
        near = [local(window, 0 if causal else window, dilation) for dilation in dilations]
        self.found = [p | First(count, seeing=False) for p in near] if count else near
        if count:
            self.q_global, self.k_global, self.v_global = (nn.Linear(dim, dim) for _ in range(3))

    def patterns(self, call: CallContext) -> Sequence[Pattern]:
        return self.found

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().project(x, call)
        if not self.global_tokens:
            return r
        few = x[:, : self.global_tokens]
        queries, keys, values = (
            p(t).unflatten(-1, (self.heads, -1)) for p, t in ((self.q_global, few), (self.k_global, x), (self.v_global, x))
        )
        if self.rotated:
            angles = self.angles(x, call)
            queries, keys = self._turned(queries, angles[:, : self.global_tokens]), self._turned(keys, angles)
        dtype = values.dtype
        return Globals(r.q, r.k, r.v, queries=queries.to(dtype), keys=keys.to(dtype), values=values)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        o = super().attend(r, call)
        if not isinstance(r, Globals):
            return o
        few, every = (torch.arange(n, device=o.device)[None] for n in (r.queries.shape[1], r.keys.shape[1]))
        seen = torch.ones_like(every, dtype=torch.bool) if call.valid is None else call.valid
        tiles = Tiles(few, every, seen[:, None, None].expand(-1, -1, few.shape[1], -1))
        wide = attention(r.queries, r.keys, r.values, [tiles], self.size**-0.5)
        return torch.cat([wide.to(o.dtype), o[:, self.global_tokens :]], 1)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        return super().attend_flops(r, past) + 4 * batch * heads * min(self.global_tokens, tokens) * tokens * size
