"""SLAB's Simplified Linear Attention (arXiv 2405.11582): ReLU on queries and keys."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.registry import register
from linattn.mixers.vision.parts import ConvolvedAttention


@register(
    "slab",
    title="SLAB, Simplified Linear Attention",
    paper="SLAB: Efficient Transformers with Simplified Linear Attention and Progressive Re-parameterized Batch Normalization",
    arxiv="2405.11582",
    year=2024,
    seeds=("001",),
    equation=r"o_t = \frac{\mathrm{relu}(q_t) \sum_i \mathrm{relu}(k_i)^\top v_i}{\mathrm{relu}(q_t) \sum_i \mathrm{relu}(k_i)^\top}"
    r" + \mathrm{DWC}(v)_t",
    kind="grid",
    causal=False,
    oracle="the paper's equations as a loop in float64, and figures of the authors' code",
)
class Slab(ConvolvedAttention):
    """Equation 9 of the paper; parameters have the names of the authors' code.

    The paper's norm, which folds into the next linear map, is :class:`linattn.mixers.vision.prepbn.PRepBN`.
    """

    def __init__(self, dim: int, heads: int = 4, *, kernel_size: int = 5, grid: tuple[int, int] = (7, 7), bias: bool = True) -> None:
        super().__init__(dim, heads, kernel_size=kernel_size, grid=grid, bias=bias)

    def feature(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def epsilon(self, tokens: int) -> float:
        return 1e-6
