"""Based (arXiv 2402.18668): the exponential's Taylor series up to its square, on queries and keys of 16 channels."""

from __future__ import annotations

from torch import Tensor

from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
from linattn.mixers.registry import register
from linattn.ops.features import taylor2


@register(
    "based",
    title="Based: Taylor linear attention",
    paper="Simple linear attention language models balance the recall-throughput tradeoff",
    arxiv="2402.18668",
    year=2024,
    seeds=("001",),
    equation=r"o_t = \frac{\sum_{i \le t} (1 + s_{ti} + s_{ti}^2 / 2)\, v_i}{\sum_{i \le t} (1 + s_{ti} + s_{ti}^2 / 2) + \varepsilon},"
    r"\quad s_{ti} = q_t k_i^\top / \sqrt{d}",
    symmetry="permutation",
    oracle="fla-core 0.6.0, naive_parallel_based; taylor-series-linear-attention 0.2.0, TaylorSeriesLinearAttn with the same weights",
    chinese={
        "Based: Taylor linear attention": "Based：泰勒线性注意力",
        "TaylorSeriesLinearAttn with the same weights": "权重相同的 TaylorSeriesLinearAttn",
    },
)
class Based(KernelAttention):
    """The linear attention of Based; 1 + s + s² / 2 is at least 1/2, so the division is safe (ε = 1e-12, as in the authors' code).

    Their features hold both s_i s_j and s_j s_i, 273 for d = 16; here each pair is kept once, 153, for the same similarity. Their
    models stack it with sliding-window attention and gated short convolutions: ``LMConfig.preset("based")``.
    """

    normalize = 1e-12

    def __init__(self, dim: int, heads: int = 4, *, feature_dim: int = 16, causal: bool = True) -> None:
        super().__init__(dim, heads, causal, feature_dim=feature_dim)

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        return taylor2(q * self.feature_dim**-0.5), taylor2(k)
