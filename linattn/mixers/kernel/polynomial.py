"""Polynomial kernel attention (arXiv 1908.11775): the second power of a shifted dot product, by its finitely many features."""

from __future__ import annotations

from torch import Tensor

from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
from linattn.mixers.registry import register
from linattn.ops.features import polynomial2


@register(
    "polynomial",
    title="Polynomial kernel attention",
    paper="Transformer Dissection: A Unified Understanding of Transformer's Attention via the Lens of Kernel",
    arxiv="1908.11775",
    year=2019,
    seeds=("001",),
    equation=r"o_t = \frac{\sum_{i \le t} (q_t k_i^\top / \sqrt{d} + c)^2\, v_i}"
    r"{\sum_{i \le t} (q_t k_i^\top / \sqrt{d} + c)^2 + \varepsilon}",
    symmetry="permutation",
    oracle="fla-core 0.6.0, naive_parallel_rebased on queries and keys with one constant channel more",
    chinese={
        "Polynomial kernel attention": "多项式核注意力",
        "naive_parallel_rebased on queries and keys with one constant channel more": "naive_parallel_rebased，查询与键各多一个常数通道",
    },
)
class Polynomial(KernelAttention):
    """Each head keeps 1 + d + d (d + 1) / 2 rows of state, 153 for d = ``feature_dim`` = 16, so queries and keys are small.

    The paper compares kernels in quadratic attention; the linear form follows from the binomial formula.
    """

    def __init__(self, dim: int, heads: int = 4, *, feature_dim: int = 16, constant: float = 1.0, causal: bool = True) -> None:
        super().__init__(dim, heads, causal, feature_dim=feature_dim)
        if constant < 0:
            raise ValueError(f"constant must be at least 0, but came as {constant}")
        self.constant = constant

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        return polynomial2(q * self.feature_dim**-0.5, self.constant), polynomial2(k, self.constant)
