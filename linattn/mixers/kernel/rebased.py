"""ReBased (arXiv 2402.10644): the square of the dot product of normed queries and keys, whose norms learn to shift and scale."""

from __future__ import annotations

from torch import Tensor

from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
from linattn.mixers.parts import WideLayerNorm
from linattn.mixers.registry import register
from linattn.ops.features import squares


@register(
    "rebased",
    title="ReBased",
    paper="Linear Transformers with Learnable Kernel Functions are Better In-Context Models",
    arxiv="2402.10644",
    year=2024,
    seeds=("001",),
    equation=r"o_t = \frac{\sum_{i \le t} (q_t k_i^\top)^2 v_i}{\sum_{i \le t} (q_t k_i^\top)^2 + \varepsilon},"
    r"\quad q_t = \gamma_q \odot \mathrm{norm}(x_t W_q) + \beta_q,\quad k_t = \gamma_k \odot \mathrm{norm}(x_t W_k) + \beta_k",
    symmetry="permutation",
    oracle="fla-core 0.6.0, naive_parallel_rebased",
)
class ReBased(KernelAttention):
    """ReBased as in the authors' code: one layer norm over all heads for queries, one for keys, 16 channels a head, ε = 1e-12."""

    heads_apart = None

    normalize = 1e-12

    def __init__(self, dim: int, heads: int = 4, *, feature_dim: int = 16, causal: bool = True) -> None:
        super().__init__(dim, heads, causal, feature_dim=feature_dim)
        self.q_norm, self.k_norm = (WideLayerNorm(heads * feature_dim) for _ in range(2))

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        q, k = (norm(t.flatten(-2)).view_as(t) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        return squares(q * self.feature_dim**-0.5), squares(k)
