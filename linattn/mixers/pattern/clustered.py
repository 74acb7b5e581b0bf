"""Clustered attention (arXiv 2007.04825): similar queries share the attention of their mean over all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.mixers.pattern.learned import by_head, pick
from linattn.mixers.registry import register


@register(
    "clustered",
    title="Clustered attention",
    paper="Fast Transformers with Clustered Attention",
    arxiv="2007.04825",
    year=2020,
    seeds=("001",),
    causal=False,
    equation=r"o_t = \mathrm{softmax}\big(\bar q_{c(t)} K^\top / \sqrt{d}\big) V,\quad \bar q_c = \mathrm{mean}\{\, q_t : c(t) = c \,\}",
    oracle="loops over hashes, Hamming distances and keys in float64, as idiap/fast-transformers has them in C++",
    families=("learnable patterns",),
    chinese={"Clustered attention": "聚类注意力"},
)
class Clustered(Softmax):
    """Queries are hashed to ``bits`` signs of random planes with a bias; ``iterations`` of Lloyd's algorithm make ``clusters`` = C of them.

    The centres start at the hashes of the first C tokens; an empty cluster keeps its centre (the authors' code draws a new one).
    The planes are drawn once and are weights; there they are drawn at every call. With one query per cluster this is softmax
    attention. Without positions, which the paper adds to the embedding.
    """

    packs = False
    keep_float32 = ("planes", "offsets")
    planes: Tensor  # [K, bits]
    offsets: Tensor  # [bits]

    def __init__(self, dim: int, heads: int = 4, *, clusters: int = 100, iterations: int = 10, bits: int = 63) -> None:
        super().__init__(dim, heads, rotated=0, causal=False)
        for name, value in (("clusters", clusters), ("iterations", iterations), ("bits", bits)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but came as {value}")
        self.clusters, self.iterations = clusters, iterations
        self.register_buffer("planes", torch.randn(self.size, bits))
        self.register_buffer("offsets", torch.randn(bits))

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        if not call.tokens:
            return r.v
        q, k, v = (by_head(t) for t in (r.q, r.k, r.v))
        cluster, members = self.cluster(q, call)
        weights = self._cluster_scores(q, k, members, call).softmax(-1)  # [B, H, C, T]
        return by_head(pick(weights.to(v.dtype) @ v, cluster))

    def _cluster_scores(self, q: Tensor, k: Tensor, members: Tensor, call: CallContext) -> Tensor:
        """Scores of all keys for the mean queries of the clusters, [B, H, C, T]."""
        mean = members.transpose(-1, -2) @ to_float32(q) / members.sum(-2).clamp(min=1)[..., None]
        scores = mean @ to_float32(k).transpose(-1, -2) * self.size**-0.5
        return scores if call.valid is None else scores.masked_fill(~self._real(call), -1e30)

    def _real(self, call: CallContext) -> Tensor:
        """Mask of real keys, [B, 1, 1, T]; all for rows without any."""
        valid = call.valid
        assert valid is not None
        return (valid | (call.counts == 0)[:, None])[:, None, None]

    @torch.no_grad()
    def cluster(self, q: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        """Cluster of each query of q [B, H, T, K], [B, H, T] int64, and as one-hot rows, [B, H, T, C]."""
        planes = self.planes
        codes = torch.where(q.to(planes.dtype) @ planes > self.offsets, 1.0, -1.0).to(planes.dtype)  # [B, H, T, bits]
        count = min(self.clusters, q.shape[2])
        centres = codes[:, :, :count]
        known = torch.arange(count, device=q.device) < call.counts.clamp(min=1)[:, None]  # [B, C]
        for _ in range(self.iterations - 1):
            _, members = self._assigned(codes, centres, known, call)
            votes = members.transpose(-1, -2) @ codes
            centres = torch.where((members.sum(-2) > 0)[..., None], torch.where(votes > 0, 1.0, -1.0), centres).to(codes.dtype)
        return self._assigned(codes, centres, known, call)

    def _assigned(self, codes: Tensor, centres: Tensor, known: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        """Nearest centre, the first of several."""
        alike = (codes @ centres.transpose(-1, -2)).masked_fill(~known[:, None, None], -torch.inf)  # bits less twice the distance
        cluster = alike.argmax(-1)
        members = torch.nn.functional.one_hot(cluster, centres.shape[2]).to(codes.dtype)
        return cluster, members if call.valid is None else members * call.valid[:, None, :, None]

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        bits, count = self.offsets.shape[0], min(self.clusters, tokens)
        clustering = bits * (size + count * (2 * self.iterations - 1))
        return 2 * batch * heads * tokens * (clustering + count * (2 * size + r.v.shape[3]))


@register(
    "improved_clustered",
    title="Improved clustered attention",
    paper="Fast Transformers with Clustered Attention",
    arxiv="2007.04825",
    year=2020,
    seeds=("001",),
    causal=False,
    equation=r"o_t = \hat m_{c(t)} \mathrm{softmax}\big(q_t K_{T(c)}^\top / \sqrt{d}\big) V_{T(c)} + \sum_{i \notin T(c)} A^c_{i} v_i,"
    r"\quad \hat m_c = \sum_{i \in T(c)} A^c_i",
    oracle="loops over hashes, Hamming distances and keys in float64, as idiap/fast-transformers has them in C++",
    families=("learnable patterns",),
    chinese={"Improved clustered attention": "改进的聚类注意力"},
)
class ImprovedClustered(Clustered):
    """Clustered attention in which every query also attends to the ``top`` keys of highest score for its cluster.

    These keys keep the cluster's total weight for them. With ``top`` at least the number of tokens this is softmax attention.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, clusters: int = 100, iterations: int = 10, bits: int = 63, top: int = 32
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, clusters=clusters, iterations=iterations, bits=bits)
        if top < 1:
            raise ValueError(f"top must be at least 1, but came as {top}")
        self.top = top

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        if not call.tokens:
            return r.v
        q, k, v = (by_head(t) for t in (r.q, r.k, r.v))
        cluster, members = self.cluster(q, call)
        cluster_scores = self._cluster_scores(q, k, members, call)
        best = cluster_scores.topk(min(self.top, call.tokens), -1).indices  # [B, H, C, top]
        weights = cluster_scores.softmax(-1)
        rest = pick(weights.scatter(-1, best, 0.0).to(v.dtype) @ v, cluster)
        mass = pick(weights.gather(-1, best).sum(-1), cluster)  # [B, H, T]
        places = pick(best, cluster)  # [B, H, T, top]
        scores = torch.einsum("bhtk,bhtsk->bhts", to_float32(q), to_float32(pick(k, places))) * self.size**-0.5
        if call.valid is not None:
            scores = scores.masked_fill(~pick(self._real(call).expand(-1, self.heads, 1, -1)[:, :, 0], places), -1e30)
        near = torch.einsum("bhts,bhtsv->bhtv", scores.softmax(-1).to(v.dtype), pick(v, places))
        return by_head(mass[..., None].to(v.dtype) * near + rest)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        return super().attend_flops(r, past) + 2 * batch * heads * tokens * min(self.top, tokens) * (size + r.v.shape[3])
