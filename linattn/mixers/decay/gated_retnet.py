"""Gated retention (YOCO, arXiv 2405.05254): RetNet with a data-dependent decay per head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, head_size, positive, rotate, to_float32
from linattn.mixers.registry import register


@register(
    "gated_retnet",
    title="Gated retention (YOCO)",
    paper="You Only Cache Once: Decoder-Decoder Architectures for Language Models",
    arxiv="2405.05254",
    year=2024,
    seeds=("004",),
    equation=r"S_t = \gamma_t S_{t-1} + k_t^\top v_t,\quad \gamma_t = \sigma(x_t w)^{1/16},\quad o_t = q_t S_t",
    oracle="fla-core 0.6.0, naive_recurrent_simple_gla; the whole block against its parallel form with explicit matrices",
    chinese={
        "Gated retention (YOCO)": "门控 retention（YOCO）",
        "the whole block against its parallel form with explicit matrices": "整块与写出全部矩阵的并行形式比较",
    },
)
class GatedRetNet(Mixer):
    """Rotary queries and keys, RMS norm per head without weights, swish gate; keys and values of dim.

    Checked against the paper's code (microsoft/unilm, YOCO/yoco/models/decoder/gate_retention.py): γ has one row of weights a head and
    no bias, the frequencies are 10000^-linspace(0, 1, K / 2), neighbouring channels rotate as pairs.
    """

    heads_apart = ()

    def __init__(self, dim: int, heads: int = 4, *, tau: float = 16.0) -> None:
        super().__init__(dim)
        positive(tau=tau)
        self.heads, self.size, self.tau = heads, head_size("dim", dim, heads), tau
        if self.size % 2:
            raise ValueError(f"dim must give every head an even number of channels to rotate, but came as {dim} with {heads} heads")
        self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.decay_proj = nn.Linear(dim, heads, bias=False)
        self.norm = HeadNorm(self.size, eps=1e-5, affine=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        frequencies = 10000.0 ** -torch.linspace(0, 1, self.size // 2, dtype=to_float32(x.new_empty(0)).dtype, device=x.device)
        angles = call.positions[..., None] * frequencies  # [B, T, K / 2]
        q, k = (rotate(t, angles, interleaved=True) for t in (q, k))
        return Recurrence(q, k, v, decay=F.logsigmoid(to_float32(self.decay_proj(x))) / self.tau)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o, self.g_proj(x).view_as(o)).flatten(-2))
