"""Focused Linear Attention, FLatten (arXiv 2308.00442): a power as feature map, which sharpens the attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.registry import register
from linattn.mixers.vision.parts import ConvolvedAttention


@register(
    "focused",
    title="Focused Linear Attention",
    paper="FLatten Transformer: Vision Transformer using Focused Linear Attention",
    arxiv="2308.00442",
    year=2023,
    seeds=("001",),
    equation=r"o_t = \frac{\phi(q_t) \sum_i \phi(k_i)^\top v_i}{\phi(q_t) \sum_i \phi(k_i)^\top} + \mathrm{DWC}(v)_t,\quad"
    r" \phi(x) = \frac{\lVert r \rVert}{\lVert r^p \rVert}\, r^p,\quad r = \mathrm{relu}(x) / \mathrm{softplus}(s)",
    kind="grid",
    causal=False,
    oracle="the paper's equations as a loop in float64, and figures of the authors' code",
)
class Focused(ConvolvedAttention):
    """φ keeps the length of a vector and rotates it towards its largest channels (proposition 1), which sharpens the attention.

    The power and the lengths are those of all D channels together, before they are divided among the heads (the authors' code).
    The convolution makes up for the low rank of the mixing matrix (section 3.3.2). Parameters have the names of the authors' code.

    Args:
        focusing_factor: the power p.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, focusing_factor: int = 3, kernel_size: int = 5, grid: tuple[int, int] = (7, 7), bias: bool = True
    ) -> None:
        super().__init__(dim, heads, kernel_size=kernel_size, grid=grid, bias=bias)
        if focusing_factor < 1:
            raise ValueError(f"focusing_factor must be at least 1, but came as {focusing_factor}")
        self.focusing_factor = focusing_factor
        self.scale = nn.Parameter(torch.zeros(1, 1, dim))

    def feature(self, x: Tensor) -> Tensor:
        return focus((F.relu(x) + 1e-6) / F.softplus(self.scale.to(x.dtype)), self.focusing_factor)

    def epsilon(self, tokens: int) -> float:
        return 1e-6 * tokens  # the authors divide sums over tokens by their number


def focus(x: Tensor, power: float) -> Tensor:
    """‖x‖ / ‖xᵖ‖ · xᵖ over the last axis for x > 0.

    It is homogeneous, so x is first divided by its largest channel, to avoid overflow and underflow of the powers.
    """
    largest = x.amax(-1, keepdim=True).detach()
    x = x / largest
    raised = x**power
    return raised * (largest * x.norm(dim=-1, keepdim=True) / raised.norm(dim=-1, keepdim=True))
