"""Gated DeltaNet (arXiv 2412.06464): the delta rule with a decay per head and token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, at_least, clamp_beta, head_size, time_steps, to_float32, unit
from linattn.mixers.registry import register


@register(
    "gated_deltanet",
    title="Gated DeltaNet",
    paper="Gated Delta Networks: Improving Mamba2 with Delta Rule",
    arxiv="2412.06464",
    year=2024,
    equation=r"S_t = \alpha_t (I - \beta_t k_t^\top k_t) S_{t-1} + \beta_t k_t^\top v_t,\quad"
    r" \alpha_t = \exp(-e^{A}\,\mathrm{softplus}(x_t w + b)),\quad o_t = q_t S_t",
    oracle="transformers, Qwen3NextGatedDeltaNet",
)
class GatedDeltaNet(Mixer):
    """Gated DeltaNet with grouped heads, as in Qwen3-Next: every key head serves ``value_heads / heads`` value heads.

    Short convolution and SiLU on q, k and v, queries and keys of unit length, RMS norm per head and then a swish gate. Time steps
    start between 0.001 and 0.1 as in the authors' code (NVlabs/GatedDeltaNet); transformers' class leaves the biases at ones, with
    decays near 0. ``negative_eigenvalues`` lets β reach 2 instead of 1 (arXiv 2411.12537).
    """

    heads_apart = ("qkv_proj: keys keys values", "conv: keys keys values")

    keep_float32 = ("A_log", "dt_bias")

    def __init__(
        self, dim: int, heads: int = 4, *, value_heads: int | None = None, key_size: int | None = None,
        value_size: int | None = None, conv_width: int = 4, negative_eigenvalues: bool = False, eps: float = 1e-6,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        self.largest_beta = 2.0 if negative_eigenvalues else 1.0
        self.heads, self.value_heads = heads, 2 * heads if value_heads is None else value_heads
        head_size("value_heads", self.value_heads, heads)
        self.key_size = head_size("dim", dim, heads) if key_size is None else key_size
        self.value_size = self.key_size if value_size is None else value_size
        at_least(1, key_size=self.key_size, value_size=self.value_size)
        self.keys, self.values = heads * self.key_size, self.value_heads * self.value_size
        self.qkv_proj = nn.Linear(dim, 2 * self.keys + self.values, bias=False)
        self.b_proj, self.a_proj = nn.Linear(dim, self.value_heads, bias=False), nn.Linear(dim, self.value_heads, bias=False)
        self.g_proj = nn.Linear(dim, self.values, bias=False)
        self.conv = ShortConvolution(2 * self.keys + self.values, conv_width)
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=torch.float32).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(time_steps(self.value_heads))
        self.norm = HeadNorm(self.value_size, eps=eps)
        self.o_proj = nn.Linear(self.values, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.conv(self.qkv_proj(x), call).split((self.keys, self.keys, self.values), -1)
        q, k = (unit(t.unflatten(-1, (self.heads, -1)), dtype=t.dtype) for t in (q, k))
        decay = -self.A_log.exp() * F.softplus(to_float32(self.a_proj(x)) + self.dt_bias)
        beta = self.largest_beta * to_float32(self.b_proj(x)).sigmoid()
        if self.largest_beta > 1:
            beta = clamp_beta(beta, k.repeat_interleave(self.value_heads // self.heads, -2))
        return Recurrence(q, k, v.unflatten(-1, (self.value_heads, -1)), decay=decay, beta=beta)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o, self.g_proj(x).view_as(o)).flatten(-2))
