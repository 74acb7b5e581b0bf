"""First-order Taylor attention (arXiv 2007.14902; Su's blog, 7546): one plus the cosine of query and key, which is never negative."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
from linattn.mixers.parts import unit
from linattn.mixers.registry import register


@register(
    "taylor",
    title="First-order Taylor linear attention",
    paper="Linear Attention Mechanism: An Efficient Attention for Semantic Segmentation",
    arxiv="2007.14902",
    year=2020,
    seeds=("000", "001"),
    equation=r"o_t = \frac{\sum_{i \le t} (1 + \hat q_t \hat k_i^\top)\, v_i}{t + \sum_{i \le t} \hat q_t \hat k_i^\top + \varepsilon},"
    r"\quad \hat x = x / \lVert x \rVert",
    symmetry="permutation",
    oracle="the quadratic formula in float64, written in the test from the paper's equation",
    chinese={"First-order Taylor linear attention": "一阶泰勒线性注意力"},
)
class Taylor(KernelAttention):
    """exp(q·k) ≈ 1 + q·k with queries and keys of unit length; S has one row more than q has channels, the sum of the values."""

    def __init__(self, dim: int, heads: int = 4, *, causal: bool = True) -> None:
        super().__init__(dim, heads, causal)

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        one = torch.ones_like(q[..., :1])
        return torch.cat([one, unit(q)], -1), torch.cat([one, unit(k)], -1)
