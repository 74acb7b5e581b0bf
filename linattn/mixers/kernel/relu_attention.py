"""ReLU linear attention (EfficientViT, arXiv 2205.14756): ReLU of queries and keys in place of the exponential."""

from __future__ import annotations

from torch import Tensor

from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
from linattn.mixers.registry import register


@register(
    "relu_attention",
    title="ReLU linear attention",
    paper="EfficientViT: Multi-Scale Linear Attention for High-Resolution Dense Prediction",
    arxiv="2205.14756",
    year=2022,
    seeds=("001",),
    equation=r"o_t = \frac{\phi(q_t) \sum_{i \le t} \phi(k_i)^\top v_i}{\phi(q_t) \sum_{i \le t} \phi(k_i)^\top + \varepsilon},"
    r"\quad \phi(x) = \max(x, 0)",
    symmetry="permutation",
    oracle="performer-pytorch 1.1.4, linear_attention on generalized_kernel without projection; the quadratic formula in float64",
    chinese={
        "ReLU linear attention": "ReLU 线性注意力",
        "linear_attention on generalized_kernel without projection": "linear_attention，generalized_kernel 不做投影",
    },
)
class ReLUAttention(KernelAttention):
    """No scale and ε = 1e-15, as in the paper's code; a query without a matching key gives 0.

    The paper's convolutions, which bring tokens of several scales of an image together, are not part of it.
    """

    normalize = 1e-15

    def __init__(self, dim: int, heads: int = 4, *, causal: bool = True) -> None:
        super().__init__(dim, heads, causal)

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        return q.relu(), k.relu()
