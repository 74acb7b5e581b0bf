"""Gated Linear Attention (arXiv 2312.06635): a decay per channel, from the token, by a low-rank map."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, at_least, head_size, positive, to_float32
from linattn.mixers.registry import register


@register(
    "gla",
    title="Gated Linear Attention",
    paper="Gated Linear Attention Transformers with Hardware-Efficient Training",
    arxiv="2312.06635",
    year=2023,
    seeds=("000", "001", "003", "004"),
    equation=r"S_t = \mathrm{Diag}(\alpha_t) S_{t-1} + k_t^\top v_t,\quad \alpha_t = \sigma(x_t W_1 W_2 + b)^{1/16},\quad o_t = q_t S_t",
    oracle="fla-core 0.6.0, naive_recurrent_gla",
)
class GLA(Mixer):
    """Keys of dim / 2, values of dim; RMS norm per head and a swish gate on the output (section 4.4 of the paper)."""

    heads_apart = ()

    def __init__(
        self, dim: int, heads: int = 4, *, key_ratio: float = 0.5, value_ratio: float = 1.0, rank: int = 16, tau: float = 16.0,
        eps: float = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        keys, values = int(dim * key_ratio), int(dim * value_ratio)
        head_size("dim * key_ratio", keys, heads)
        size = head_size("dim * value_ratio", values, heads)
        at_least(1, rank=rank)
        positive(tau=tau)
        self.heads, self.tau = heads, tau
        self.q_proj, self.k_proj = nn.Linear(dim, keys, bias=False), nn.Linear(dim, keys, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, values, bias=False), nn.Linear(dim, values, bias=False)
        self.decay_proj = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, keys))
        self.norm = HeadNorm(size, eps=eps)
        self.o_proj = nn.Linear(values, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v, decay = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj, self.decay_proj))
        return Recurrence(q, k, v, decay=F.logsigmoid(to_float32(decay)) / self.tau)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o, self.g_proj(x).view_as(o)).flatten(-2))
