"""Top-k attention (arXiv 1912.11637, 2106.06899): softmax over the k tokens of highest score."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.mixers.attention.weighed import Weighed
from linattn.mixers.registry import register


@register(
    "topk",
    title="Top-k attention",
    paper="Explicit Sparse Transformer: Concentrated Attention Through Explicit Selection",
    arxiv="1912.11637",
    year=2019,
    seeds=("001", "004"),
    equation=r"o_t = \sum_{i \in I_t} \mathrm{softmax}_{i \in I_t}(q_t k_i^\top / \sqrt{d})\, v_i,"
    r"\quad I_t = \mathrm{top}_k\{q_t k_i^\top : i \le t\}",
    recurrent=False,
    oracle="x-transformers 2.31.10, Attend(sparse_topk=k); softmax and hard attention as its limits",
    families=("softmax attention", "sparse"),
    chinese={"Top-k attention": "Top-k 注意力", "softmax and hard attention as its limits": "两端的极限是 softmax 与硬注意力"},
)
class TopK(Weighed):
    """Between hard attention, k = 1, and softmax attention, k the number of tokens. Ties with the k-th score are included.

    All scores are computed, so time grows as for softmax. State and parameters are those of ``softmax``.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        k: how many tokens a head reads.
        causal: False lets every token read all of its sequence.
        rotary: rotates queries and keys by position.
    """

    def __init__(self, dim: int, heads: int = 4, *, k: int = 8, causal: bool = True, rotary: bool = True) -> None:
        super().__init__(dim, heads, causal=causal, rotary=rotary)
        if k < 1:
            raise ValueError(f"k must be at least 1 token, but came as {k}")
        self.k = k

    def weights(self, scores: Tensor) -> Tensor:
        least = scores.topk(min(self.k, scores.shape[-1]), -1)[0][..., -1:]
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1)
