"""LightNet (arXiv 2405.21022): a decay per channel that makes each row of the state an average of the values so far."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import log_fading, logsumexp_so_far, only_real
from linattn.mixers.parts import HeadNorm, at_least, head_size, to_float32
from linattn.mixers.registry import register


@register(
    "lightnet",
    title="LightNet",
    paper="You Only Scan Once: Efficient Multi-dimension Sequential Modeling with LightNet",
    arxiv="2405.21022",
    year=2024,
    equation=r"S_t = \mathrm{Diag}(\alpha_t) S_{t-1} + (1 - \alpha_t)^\top v_t,\quad"
    r" 1 - \alpha_t = \frac{\exp(k_t)}{\sum_{i \le t} \exp(k_i)},\quad o_t = q_t S_t",
    oracle="fla-core 0.6.0, naive_recurrent_gla with keys of 1 - α; the averages of the equation on every prefix in float64",
    chinese={
        "naive_recurrent_gla with keys of 1 - α": "naive_recurrent_gla，键取 1 − α",
        "the averages of the equation on every prefix in float64": "float64 下按公式对每个前缀求平均",
    },
)
class LightNet(Mixer):
    """The paper's additive recurrence: with L_t = log Σ_{i ≤ t} exp(k_i), α_t is exp(L_{t-1} - L_t) and no exponential overflows.

    Queries through swish, scaled by K^-1/2; one RMS norm over all heads and a swish gate by a map of ``rank`` on the output, as in
    fla's layer. ``head_dim`` is fla's ``expand_ratio`` (128 where it divides dim). The positional encodings of the paper (MD-TPE,
    MD-LRPE) belong to a model. State: S and L, ``log_total`` [rows, dim].
    """

    def __init__(self, dim: int, *, head_dim: int | None = None, rank: int = 128, eps: float = 1e-6) -> None:
        super().__init__(dim)
        size = math.gcd(dim, 128) if head_dim is None else head_dim
        at_least(1, head_dim=size, rank=rank)
        self.heads = dim // head_size("dim", dim, max(dim // size, 1))
        if self.heads * size != dim:
            raise ValueError(f"dim must be a multiple of head_dim = {size}, but came as {dim}")
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.g_proj = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False))
        self.norm = HeadNorm(dim, eps=eps)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        k = only_real(to_float32(self.k_proj(x)), call)
        before, total, _ = logsumexp_so_far(k, call, "log_total")
        k, decay = (k - total).exp(), log_fading(before, total)
        q, k, v, decay = (t.unflatten(-1, (self.heads, -1)) for t in (F.silu(self.q_proj(x)), k, self.v_proj(x), decay))
        return Recurrence(q, k, v, decay=decay)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o.flatten(-2), self.g_proj(x)))
