"""Retention (RetNet, arXiv 2307.08621): a decay that is constant in time and different in each head, and rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, head_size, rotate, to_float32
from linattn.mixers.registry import register


@register(
    "retnet",
    title="Multi-scale retention (RetNet)",
    paper="Retentive Network: A Successor to Transformer for Large Language Models",
    arxiv="2307.08621",
    year=2023,
    seeds=("000", "001", "003", "004"),
    equation=r"S_t = \gamma_h S_{t-1} + k_t^\top v_t,\quad \gamma_h = 1 - 2^{-5-h},\quad o_t = q_t S_t",
    oracle="torchscale's parallel form, from its formulas: decay mask, rotary positions, normalised scores",
    chinese={
        "Multi-scale retention (RetNet)": "多尺度 retention（RetNet）",
        "torchscale's parallel form, from its formulas: decay mask, rotary positions, normalised scores": (
            "按公式写出的 torchscale 并行形式：衰减掩码、旋转位置、归一化的得分"
        ),
    },
)
class RetNet(Mixer):
    """Keys of dim, values of 2 dim; RMS norm per head without weights (the paper's group norm) and a swish gate (section 2.2).

    ``eps`` is the norm's. As in flash-linear-attention: norm weights with ``affine``, and, if not ``interleaved``, Llama's rotary
    positions, which pair channels i and i + K / 2, with frequencies 10000^(-2i / K).
    """

    def __init__(self, dim: int, heads: int = 4, *, eps: float = 1e-6, affine: bool = False, interleaved: bool = True) -> None:
        super().__init__(dim)
        self.interleaved = interleaved
        self.heads, self.size = heads, head_size("dim", dim, heads)
        if self.size % 2:
            raise ValueError(f"dim must give every head an even number of channels to rotate, but came as {dim} with {heads} heads")
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.norm = HeadNorm(2 * self.size, eps=eps, affine=affine)
        self.o_proj = nn.Linear(2 * dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        exact = to_float32(x.new_empty(0)).dtype
        last = 1 if self.interleaved else 1 - 2 / self.size  # the exponent of the slowest pair
        frequencies = 10000.0 ** -torch.linspace(0, last, self.size // 2, dtype=exact, device=x.device)
        angles = call.positions[..., None] * frequencies  # [B, T, K / 2]
        q, k = (rotate(t, angles, interleaved=self.interleaved) for t in (q, k))
        head = torch.arange(self.heads, dtype=exact, device=x.device)
        return Recurrence(q, k, v, decay=torch.log1p(-torch.exp2(-5 - head)))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o, self.g_proj(x).view_as(o)).flatten(-2))
