"""ETC (arXiv 2004.08483): a long input with local attention, and a few global tokens that see all and are seen by all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.memory.attention import check_least, softmax_attention
from linattn.mixers.parts import head_size, to_float32
from linattn.mixers.registry import register


class Side(nn.Module):
    """Projections of one of the two inputs: its queries, keys and values of both inputs, and its table of relations."""

    def __init__(self, dim: int, heads: int, labels: int) -> None:
        super().__init__()
        self.heads, self.size = heads, head_size("dim", dim, heads)
        self.q_proj, self.k_proj, self.v_proj, self.k_other, self.v_other, self.o_proj = (nn.Linear(dim, dim) for _ in range(6))
        self.relation = nn.Parameter(nn.init.trunc_normal_(torch.empty(labels, heads, self.size), std=0.5))
        self.relation_bias = nn.Parameter(torch.zeros(labels, heads))

    def project(self, own: Tensor, other: Tensor) -> list[Tensor]:
        """q, k and v of its ``own`` tokens [B, T, D], k and v of the ``other`` ones: [B, .., H, K] each."""
        maps = (self.q_proj, own), (self.k_proj, own), (self.v_proj, own), (self.k_other, other), (self.v_other, other)
        return [p(t).unflatten(-1, (self.heads, -1)) for p, t in maps]

    def bias(self, q: Tensor, labels: Tensor) -> Tensor:
        """Score bias [B, H, T, S] of the relations ``labels`` [B, T, S] for q [B, T, H, K]."""
        scores = torch.einsum("bthk,lhk->bhtl", to_float32(q), to_float32(self.relation)) + to_float32(self.relation_bias).T[:, None]
        return (scores * self.size**-0.5).gather(3, labels[:, None].expand(-1, self.heads, -1, -1))


@register(
    "etc",
    title="ETC, Extended Transformer Construction",
    paper="ETC: Encoding Long and Structured Inputs in Transformers",
    arxiv="2004.08483",
    year=2020,
    seeds=("001",),
    causal=False,
    linear_in_values=False,  # each input has its own projections of values
    equation=r"s_{ti} = q_t k_i^\top + q_t a_{l(t,i)}^\top + b_{l(t,i)},\quad"
    r" o_t = \sum_{i \in N(t)} \mathrm{softmax}_i(s_{ti} / \sqrt{d})\, v_i,"
    r"\quad N(t) = \{|t - i| \le r\} \cup \{i < g\},\quad N(t) = \text{all for } t < g",
    oracle="the equations of the authors' FusedGlobalLocalAttention as loops in float64",
    families=("fixed patterns", "combined patterns", "neural memory"),
    chinese={
        "the equations of the authors' FusedGlobalLocalAttention as loops in float64": (
            "float64 循环计算作者 FusedGlobalLocalAttention 的公式"
        ),
    },
)
class ETC(Mixer):
    """The first ``global_tokens`` = g tokens are the global input, all others the long one, whose tokens see each other up to ``radius`` =
    r tokens away. Both have their own projections and tables a, b; one softmax covers both inputs.

    The label l of a pair of one input is its distance, clipped to ``distance`` on both sides; of a long and a global token, whether they
    are associated: with ``segment`` = s the long tokens from j s to (j + 1) s - 1 are associated with global token j, without it none
    is. With ``hard`` a global token sees only its own segment of the long input (the paper's hard g2l). Positions are in the labels.
    """

    packs = False

    def __init__(
        self, dim: int, heads: int = 4, *, global_tokens: int = 8, radius: int = 84, distance: int = 12, segment: int | None = None,
        hard: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        check_least(1, global_tokens=global_tokens, radius=radius, distance=distance)
        if segment is not None:
            check_least(1, segment=segment)
        if hard and segment is None:
            raise ValueError("segment must be given where hard=True: without it no long token belongs to a global one")
        self.global_tokens, self.radius, self.distance, self.segment, self.hard = global_tokens, radius, distance, segment, hard
        self.long, self.globals = (Side(dim, heads, 2 * distance + 3) for _ in range(2))

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        real = torch.ones_like(x[..., 0], dtype=torch.bool) if call.valid is None else call.valid
        few, many = x.tensor_split((self.global_tokens,), 1)
        return torch.cat([self._global(few, many, real), self._long(few, many, real)], 1)

    def _global(self, few: Tensor, many: Tensor, real: Tensor) -> Tensor:
        """Output of the global tokens ``few`` [B, g, D]; of these and ``many`` [B, n, D] those ``real`` [B, g + n] count."""
        if not few.shape[1]:
            return few
        q, k, v, k_long, v_long = self.globals.project(few, many)
        place = torch.arange(few.shape[1], device=few.device)
        own = self._own(torch.arange(many.shape[1], device=few.device), place).T  # [g, n]
        labels = torch.cat([self._apart(place - place[:, None]), self._together(own)], 1).expand(few.shape[0], -1, -1)
        seen = real[:, None].expand(-1, few.shape[1], -1)
        if self.hard:
            seen = seen & F.pad(own, (few.shape[1], 0), value=True)
        k, v = torch.cat([k, k_long], 1), torch.cat([v, v_long], 1)
        return self.globals.o_proj(softmax_attention(q, k, v, seen, bias=self.globals.bias(q, labels)).flatten(-2))

    def _long(self, few: Tensor, many: Tensor, real: Tensor) -> Tensor:
        """Output of the long input: blocks of queries, each with the keys around it and the global ones."""
        rows, tokens, _ = many.shape  # an empty input gets one block of padding, so that every parameter has a gradient
        q, k, v, k_global, v_global = self.long.project(many, few)
        reach, size = self.radius, max(1, min(self.radius, tokens))
        count = max(1, -(-tokens // size))
        fill = count * size - tokens
        q = F.pad(q, (0, 0, 0, 0, 0, fill)).unflatten(1, (count, size)).flatten(0, 1)  # [B N, C, H, K]
        k, v = (F.pad(t, (0, 0, 0, 0, reach, reach + fill)).unfold(1, size + 2 * reach, size) for t in (k, v))
        k, v = (t.movedim(-1, 2).flatten(0, 1) for t in (k, v))  # [B N, C + 2 r, H, K]
        k, v = (torch.cat([t, g.repeat_interleave(count, 0)], 1) for t, g in ((k, k_global), (v, v_global)))
        known = F.pad(real[:, few.shape[1] :], (reach, reach + fill)).unfold(1, size + 2 * reach, size).flatten(0, 1)
        away = torch.arange(-reach, size + reach, device=q.device) - torch.arange(size, device=q.device)[:, None]  # [C, C + 2 r]
        near = known[:, None] & (away.abs() <= reach)
        shared = real[:, : few.shape[1]].repeat_interleave(count, 0)[:, None].expand(-1, size, -1)
        place = torch.arange(count * size, device=q.device).unflatten(0, (count, size))
        together = self._together(self._own(place, torch.arange(few.shape[1], device=q.device)))  # [N, C, g]
        labels = torch.cat([self._apart(away).expand(count, -1, -1), together], 2).repeat(rows, 1, 1)
        o = softmax_attention(q, k, v, torch.cat([near, shared], 2), bias=self.long.bias(q, labels))
        return self.long.o_proj(o.unflatten(0, (rows, count)).flatten(1, 2)[:, :tokens].flatten(-2))

    def _own(self, place: Tensor, global_place: Tensor) -> Tensor:
        """True if the long token at ``place`` [...] belongs to the global one at ``global_place`` [g]: [..., g]."""
        if self.segment is None:
            return torch.zeros_like(place, dtype=torch.bool)[..., None].expand(*place.shape, len(global_place))
        return place[..., None] // self.segment == global_place

    def _apart(self, away: Tensor) -> Tensor:
        """Label of a key ``away`` tokens after its query: 0, 1 ... for later ones, then those of earlier ones."""
        clipped = away.clamp(-self.distance, self.distance)
        return torch.where(clipped < 0, self.distance - clipped, clipped)

    def _together(self, own: Tensor) -> Tensor:
        """Label of a long and a global token."""
        return 2 * self.distance + 1 + own.long()
