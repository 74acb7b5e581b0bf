"""Softmax attention to a context (arXiv 1706.03762, section 3.2.3): between a decoder and its encoder."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kinds import CrossMixer
from linattn.mixers.parts import head_size
from linattn.mixers.registry import register
from linattn.ops.dot_product import dot_product_attention


@register(
    "cross_softmax",
    title="Softmax attention to a context",
    paper="Attention Is All You Need",
    arxiv="1706.03762",
    year=2017,
    seeds=("001", "002"),
    equation=r"o_t = \sum_i \frac{\exp(q_t k_i^\top / \sqrt{d})}{\sum_j \exp(q_t k_j^\top / \sqrt{d})}\, v_i",
    kind="cross",
    causal=False,
    recurrent=False,
    symmetry="permutation",
    oracle="torch's MultiheadAttention with the same weights",
    families=("softmax attention",),
    chinese={
        "Softmax attention to a context": "softmax 交叉注意力",
        "torch's MultiheadAttention with the same weights": "权重相同的 torch MultiheadAttention",
    },
)
class CrossSoftmax(CrossMixer):
    """Keys and values of the context are its state, ``k``, ``v`` [B, T, H, K] and which of them are real, ``valid`` [B, T].

    Without positions, which tokens may contain.
    """

    def __init__(self, dim: int, heads: int = 4, *, bias: bool = False) -> None:
        super().__init__(dim)
        head_size("dim", dim, heads)
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=bias) for _ in range(4))

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        assert call.across is not None
        maps = ((self.q_proj, x), (self.k_proj, call.across.tokens), (self.v_proj, call.across.tokens))
        return Recurrence(*(project(t).unflatten(-1, (self.heads, -1)) for project, t in maps))

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert call.across is not None
        if call.fresh:
            valid = call.across.valid
            known = {"k": r.k, "v": r.v, "valid": r.k.new_ones(r.k.shape[:2]).bool() if valid is None else valid}
        else:
            known = {name: cast(Tensor, call.get(name)) for name in ("k", "v", "valid")}
        for name, value in known.items():
            call.keep(name, value)
        seen = known["valid"]
        seen = (seen | ~seen.any(1, keepdim=True))[:, None, None]  # rows of padding alone see all of it: zeros, so the output is 0
        q, k, v = (t.transpose(1, 2) for t in (r.q, known["k"].to(r.q.dtype), known["v"].to(r.q.dtype)))
        if not k.shape[2]:
            return r.q.masked_fill(torch.ones_like(r.q, dtype=torch.bool), 0.0)  # 0, but with a gradient
        return dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        return 4 * batch * heads * tokens * r.k.shape[1] * size
