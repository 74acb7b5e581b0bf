"""Cluster-Former (arXiv 2009.06097): tokens see each other if their hidden states share the nearest centre, at any distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.pattern.learned import by_head, grouped, pick
from linattn.mixers.registry import register
from linattn.ops.tiles import summed


@dataclass(frozen=True, kw_only=True)
class Assigned(Recurrence):
    """``cluster`` [B, T]: the nearest centre of each token."""

    cluster: Tensor


@register(
    "cluster_former",
    title="Cluster-Former",
    paper="Cluster-Former: Clustering-based Sparse Transformer for Question Answering",
    arxiv="2009.06097",
    year=2020,
    seeds=("001",),
    causal=False,
    equation=r"o_t = \sum_{i : c(x_i) = c(x_t)} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big) v_i,"
    r"\quad c(x) = \arg\min_j \lVert x - \mu_j \rVert",
    oracle="the quadratic formula in float64 under the mask of equal clusters, written in the test with loops",
    exemptions={"bidirectional.reach": "a token reads only those that are nearest to the same centre"},
    families=("learnable patterns",),
    chinese={
        "the quadratic formula in float64 under the mask of equal clusters": "float64 下的平方形式公式，掩码只留同簇",
        "a token reads only those that are nearest to the same centre": "一个 token 只读得到与它同属一个中心的 token",
    },
)
class ClusterFormer(Softmax):
    """The layer of clusters; the paper alternates it with sliding windows: ``"local, cluster_former"``.

    ``clusters`` = C centres μ in the space of the layer's tokens. They are not parameters but the result of k-means over the tokens of many
    sequences: training should call :meth:`refresh` regularly, as the paper does with a bank of hidden states.
    A cluster of more than ``chunk`` tokens is split into chunks, in the order of positions, that do not see each other; so the work
    grows linearly with n for clusters of any sizes.
    """

    packs = False
    keep_float32 = ("centres",)
    centres: Tensor  # [C, D]

    def __init__(self, dim: int, heads: int = 4, *, clusters: int = 64, chunk: int = 256, rotary: bool = True) -> None:
        super().__init__(dim, heads, rotated=None if rotary else 0, causal=False)
        for name, value in (("clusters", clusters), ("chunk", chunk)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but came as {value}")
        self.clusters, self.chunk = clusters, chunk
        self.register_buffer("centres", torch.randn(clusters, dim))

    def nearest(self, x: Tensor) -> Tensor:
        """The cluster of each token of x [..., D]."""
        x = x.detach().to(self.centres.dtype)
        return (x @ self.centres.T - self.centres.square().sum(-1) / 2).argmax(-1)

    @torch.no_grad()
    def refresh(self, x: Tensor, iterations: int = 10) -> None:
        """Move the centres by ``iterations`` of k-means over tokens x [..., D] as they come into this layer; a centre without tokens
        stays.
        """
        x = x.flatten(0, -2).to(self.centres.dtype)
        for _ in range(iterations):
            members = torch.nn.functional.one_hot(self.nearest(x), self.clusters).to(x.dtype)
            counts = members.sum(0)[:, None]
            self.centres.copy_(torch.where(counts > 0, members.T @ x / counts.clamp(min=1), self.centres))

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().project(x, call)
        return Assigned(r.q, r.k, r.v, cluster=self.nearest(x))

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, Assigned)
        cluster = r.cluster
        if not call.tokens:
            return r.v
        if call.valid is not None:
            cluster = torch.where(call.valid, cluster, self.clusters)
        groups = grouped(cluster, self.clusters + 1, min(self.chunk, call.tokens))
        places = groups.places[:, None].expand(-1, self.heads, -1, -1)  # [B, H, N, chunk]
        q, k, v = (pick(by_head(t), places) for t in (r.q, r.k, r.v))
        real = places >= 0
        o, _ = summed(self.size**-0.5 * q, k, v, real[..., None, :] & real[..., None])
        where = groups.where[:, None, :, None].expand(-1, self.heads, -1, o.shape[-1])
        return by_head(o.flatten(2, 3).gather(2, where)).to(r.v.dtype)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        chunk = min(self.chunk, max(tokens, 1))
        pairs = (tokens // chunk + self.clusters + 1) * chunk**2
        return 2 * batch * heads * (pairs * (size + r.v.shape[3]) + tokens * self.clusters * size)
