"""Comba (arXiv 2506.02475): the delta rule with separate strengths of feedback and write, and output correction by the key."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, head_size, time_steps, to_float32, unit
from linattn.mixers.registry import register


@register(
    "comba",
    title="Comba",
    paper="Comba: Improving Bilinear RNNs with Closed-loop Control",
    arxiv="2506.02475",
    year=2025,
    equation=r"S_t = \alpha_t S_{t-1} + \beta_t k_t^\top (v_t - p_t S_{t-1}),\quad p_t = \sigma(b)\, k_t,"
    r"\quad o_t = (q_t - d\, k_t) S_t,\quad \alpha_t = \exp(-e^{A}\,\mathrm{softplus}(x_t w + c))",
    oracle="fla-core 0.6.0, naive_chunk_comba",
)
class Comba(Mixer):
    """Keys of dim, values of ``value_ratio`` dim; b and d are a number per head, ``correction`` is the initial d.

    Short convolution and SiLU on q, k and v, queries and keys of unit length, RMS norm per head and then a sigmoid gate. The
    authors start d at 1, and at 0.02 in small models. The feedback p reads the state *before* its decay (the transition α - σ(b) β kᵀk
    is scalar plus rank one), as in the paper, the authors' two kernels in fla and its naive_chunk_comba; its naive_recurrent_comba lets
    p read the decayed state. Their layer normalises q - d p and p once more, so that σ(b) no longer scales the feedback; here it does,
    as in the paper's equations.
    """

    heads_apart = ("qkv_proj: keys keys values", "conv: keys keys values")

    keep_float32 = ("A_log", "dt_bias")

    def __init__(self, dim: int, heads: int = 4, *, value_ratio: float = 2.0, correction: float = 1.0, conv_width: int = 4) -> None:
        super().__init__(dim)
        self.heads, self.keys, self.values = heads, dim, int(dim * value_ratio)
        head_size("dim", dim, heads)
        size = head_size("dim * value_ratio", self.values, heads)
        self.qkv_proj = nn.Linear(dim, 2 * self.keys + self.values, bias=False)
        self.conv = ShortConvolution(2 * self.keys + self.values, conv_width)
        self.a_proj, self.b_proj = nn.Linear(dim, heads, bias=False), nn.Linear(dim, heads, bias=False)
        self.feedback = nn.Parameter(torch.ones(heads))  # b, before its sigmoid
        self.correction = nn.Parameter(torch.full((heads,), float(correction)))  # d
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(time_steps(heads))
        self.g_proj = nn.Linear(dim, self.values, bias=False)
        self.norm = HeadNorm(size)
        self.o_proj = nn.Linear(self.values, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.conv(self.qkv_proj(x), call).split((self.keys, self.keys, self.values), -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        k = to_float32(unit(k, dtype=v.dtype))  # rounded as in the recurrence, so that erasures match writes
        beta = to_float32(self.b_proj(x)).sigmoid()[..., None]
        decay = -self.A_log.exp() * F.softplus(to_float32(self.a_proj(x)) + self.dt_bias)
        q = unit(q) - to_float32(self.correction)[:, None] * k
        return Recurrence(q, k, beta * to_float32(v), decay=decay, erase=(to_float32(self.feedback).sigmoid()[:, None] * k, -beta * k))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj((to_float32(self.norm(o)).flatten(-2) * to_float32(self.g_proj(x)).sigmoid()).to(o.dtype))
