"""Sparse Sinkhorn attention (arXiv 2002.11296): blocks of keys are soft-sorted to blocks of queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.mixers.pattern.learned import by_head
from linattn.mixers.registry import register

NEVER = -1e30  # logarithm of the weight of an absent block


@register(
    "sinkhorn",
    title="Sparse Sinkhorn attention",
    paper="Sparse Sinkhorn Attention",
    arxiv="2002.11296",
    year=2020,
    seeds=("001",),
    causal=False,
    growth="n^2",
    equation=r"o_t = \mathrm{softmax}\big(q_t [K_b; (R K)_b]^\top / \sqrt{d}\big) [V_b; (R V)_b],\quad b = \lfloor t / B \rfloor,"
    r"\quad R = \mathrm{Sinkhorn}\big(\log \mathrm{ReLU}(\bar q_b \bar k_{b'}^\top / \sqrt{d}) / \tau\big)",
    oracle="sinkhorn-transformer 0.11.4, sinkhorn_sorting_operator, in a loop of the test: its attention uses keys for values",
    families=("learnable patterns",),
    chinese={
        "Sparse Sinkhorn attention": "稀疏 Sinkhorn 注意力",
        "in a loop of the test: its attention uses keys for values": "放进测试的循环里：它自己的注意力把键当作值",
    },
)
class Sinkhorn(Softmax):
    """Blocks of ``block`` = B tokens. R [blocks, blocks] is computed from the blocks' mean queries and keys and made nearly doubly
    stochastic by ``iterations`` of Sinkhorn's normalisation at ``temperature`` τ; ``noise`` adds the paper's Gumbel noise while training.

    A query sees its own block and the one sorted to it. With ``sortcut`` = n every query sees the first n sorted blocks and nothing
    else (the paper's SortCut), which is linear in n; the other is n B, and (n / B)² B for sorting. Only without causality.
    """

    packs = False

    def __init__(
        self, dim: int, heads: int = 4, *, block: int = 64, iterations: int = 7, temperature: float = 0.75, sortcut: int = 0,
        noise: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, rotated=0, causal=False)
        for name, value, least in (("block", block, 1), ("iterations", iterations, 1), ("sortcut", sortcut, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, but came as {value}")
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, but came as {temperature}")
        self.block, self.iterations, self.temperature, self.sortcut, self.noise = block, iterations, temperature, sortcut, noise

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        if not call.tokens:
            return r.v
        fill = -call.tokens % self.block
        real = torch.arange(call.tokens + fill, device=r.q.device) < call.counts[:, None]
        real = real.unflatten(1, (-1, self.block))[:, None]  # [B, 1, N, block]
        q, k, v = (F.pad(by_head(t), (0, 0, 0, fill)).unflatten(2, (-1, self.block)) for t in (r.q, r.k, r.v))  # [B, H, N, block, K]
        order = self.sorting(q, k, real).to(v.dtype)
        if self.sortcut:
            order = order[:, :, : self.sortcut]
        sorted_k, sorted_v = (torch.einsum("bhnm,bhmsk->bhnsk", order, t) for t in (k, v))
        there = real.any(-1)[..., : order.shape[2], None].expand(-1, -1, -1, self.block)  # [B, 1, N, block]: rows of R that are real
        if self.sortcut:
            keys, values = sorted_k.flatten(2, 3)[:, :, None], sorted_v.flatten(2, 3)[:, :, None]
            seen = there.flatten(2)[:, :, None, None].expand(-1, -1, q.shape[2], -1, -1)
        else:
            keys, values = torch.cat([k, sorted_k], 3), torch.cat([v, sorted_v], 3)
            seen = torch.cat([real, there], -1)[..., None, :]
        seen = seen | ~seen.any(-1, keepdim=True)  # padding, and rows without a token
        scores = (to_float32(q) @ to_float32(keys).transpose(-1, -2) * self.size**-0.5).masked_fill(~seen, NEVER)
        return by_head((scores.softmax(-1).to(v.dtype) @ values).flatten(2, 3)[:, :, : call.tokens])

    def sorting(self, q: Tensor, k: Tensor, real: Tensor) -> Tensor:
        """R [B, H, N, N] of blocks q, k [B, H, N, block, K] with ``real`` tokens [B, 1, N, block]; 0 for absent blocks."""
        count = real.sum(-1, keepdim=True).clamp(min=1)
        q, k = (torch.where(real[..., None], to_float32(t), 0.0).sum(3) / count for t in (q, k))
        scores = ((q @ k.transpose(-1, -2) * self.size**-0.5).relu() + 1e-6).log()
        if self.noise and self.training:
            scores = scores - (1e-6 - (1e-6 + torch.rand_like(scores)).log()).log()
        there = real.any(-1)  # [B, 1, N]
        pair = there[..., None] & there[..., None, :]
        log = (scores / self.temperature).masked_fill(~pair, NEVER)
        for _ in range(self.iterations):
            log = (log - log.logsumexp(-1, keepdim=True)).masked_fill(~pair, NEVER)
            log = (log - log.logsumexp(-2, keepdim=True)).masked_fill(~pair, NEVER)
        return log.exp().masked_fill(~pair, 0.0)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        both, count = size + r.v.shape[3], -(-tokens // self.block)
        rows, seen = (min(self.sortcut, count), min(self.sortcut, count)) if self.sortcut else (count, 2)
        return 2 * batch * heads * (count**2 * size + rows * count * self.block * both + count * self.block**2 * seen * both)
