"""Routing Transformer (arXiv 2003.05997): attention within clusters of equal size, the tokens nearest to each centre."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.pattern.learned import by_head, pick
from linattn.mixers.registry import register
from linattn.ops.tiles import summed


@register(
    "routing",
    title="Routing Transformer",
    paper="Efficient Content-Based Sparse Attention with Routing Transformers",
    arxiv="2003.05997",
    year=2020,
    seeds=("001",),
    causal=False,
    growth="n^1.5",
    equation=r"o_t = \operatorname*{mean}_{c : t \in T_c}\ \sum_{i \in S_c} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big) v_i,"
    r"\quad T_c = \text{the } n / C \text{ queries of largest } \mu_c \hat q^\top,"
    r"\quad S_c = \text{the } n / C \text{ keys of largest } \mu_c \hat k^\top",
    oracle="routing-transformer 1.6.1, KmeansAttention",
    families=("learnable patterns",),
    chinese={"the ": "取 ", " queries of largest ": " 个查询，使其最大：", " keys of largest ": " 个键，使其最大："},
)
class Routing(Softmax):
    """``clusters`` = C centres μ of unit length in each head. Each takes n / C queries and as many keys, at least ``least``. A token may
    be in several clusters, whose outputs are averaged (their sum over their number + 1e-5), or in none, which gives 0.

    C should be about the root of the length; the default is that of 16,384 tokens. The centres are not parameters: :meth:`learn` moves
    them by the paper's moving average of spherical k-means, and training should call it. Without causality alone: which tokens a
    cluster takes depends on all of them, so a causal model would see later ones. Maps, no positions, as in the oracle.
    """

    packs = False
    keep_float32 = ("centres",)
    centres: Tensor  # [H, C, K]

    def __init__(self, dim: int, heads: int = 4, *, clusters: int = 128, least: int = 16) -> None:
        super().__init__(dim, heads, rotated=0, causal=False)
        for name, value in (("clusters", clusters), ("least", least)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but came as {value}")
        self.clusters, self.least = clusters, least
        self.register_buffer("centres", F.normalize(torch.randn(heads, clusters, self.size), dim=-1))

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        if not call.tokens:
            return r.v
        q, k, v = (by_head(t) for t in (r.q, r.k, r.v))
        taken, keys = self.routed(q, call), self.routed(k, call)  # [B, H, C, w]
        real = (taken[..., None] >= 0) & (keys[..., None, :] >= 0)
        o, _ = summed(self.size**-0.5 * pick(q, taken), pick(k, keys), pick(v, keys), real)
        return by_head(self._averaged(o.flatten(2, 3), taken.flatten(2), call.tokens)).to(r.v.dtype)

    @torch.no_grad()
    def routed(self, t: Tensor, call: CallContext) -> Tensor:
        """Tokens of t [B, H, T, K] that each cluster takes, [B, H, C, w], -1 for none."""
        near = self._near(t)
        if call.valid is not None:
            near = near.masked_fill(~call.valid[:, None, :, None], -torch.inf)
        width = min(max(-(-call.tokens // self.clusters), self.least), call.tokens)
        best = near.topk(width, 2).indices.transpose(-1, -2)  # [B, H, C, w]
        own = torch.minimum((-(-call.counts // self.clusters)).clamp(min=self.least), call.counts)  # [B]: of a row
        return torch.where(torch.arange(width, device=t.device) < own[:, None, None, None], best, -1)

    def _near(self, t: Tensor) -> Tensor:
        """Similarity of each token of t [B, H, T, K] to each centre, [B, H, T, C]."""
        return F.normalize(t.detach().to(self.centres.dtype), dim=-1) @ self.centres.transpose(-1, -2)

    def _averaged(self, o: Tensor, places: Tensor, tokens: int) -> Tensor:
        """Mean of all outputs o [B, H, N, V] of the token at ``places`` [B, H, N]: [B, H, T, V]."""
        batch, heads = o.shape[:2]
        at = (torch.arange(batch * heads, device=o.device).view(batch, heads, 1) * tokens + places.clamp(min=0)).flatten()
        real = (places >= 0).flatten()[:, None].to(o.dtype)
        total = o.new_zeros(batch * heads * tokens, o.shape[-1]).index_put((at,), o.flatten(0, 2) * real, accumulate=True)
        count = real.new_zeros(batch * heads * tokens, 1).index_put((at,), real, accumulate=True)
        return (total / (count + 1e-5)).view(batch, heads, tokens, o.shape[-1])

    @torch.no_grad()
    def learn(self, x: Tensor, decay: float = 0.999) -> None:
        """Update each centre to the moving average, with factor ``decay``, of the mean of the tokens x [B, T, D] nearest to it."""
        r = self.project(x, CallContext(x, returning=False))
        t = torch.cat([by_head(r.q), by_head(r.k)], 2)
        members = F.one_hot(self._near(t).argmax(-1), self.clusters).to(self.centres.dtype)  # [B, H, 2 T, C]
        total = torch.einsum("bhtc,bhtk->hck", members, F.normalize(t.to(self.centres.dtype), dim=-1))
        new = torch.where((members.sum((0, 2)) > 0)[..., None], F.normalize(total, dim=-1), self.centres)
        self.centres.lerp_(new, 1 - decay)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        width = min(max(-(-tokens // self.clusters), self.least), tokens)
        return 2 * batch * heads * self.clusters * (2 * tokens * size + width**2 * (size + r.v.shape[3]))
