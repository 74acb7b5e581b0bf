"""Rodimus (arXiv 2410.06577): one selection gate for decay and write strength, with a temperature per channel."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, at_least, time_steps, to_float32, unit
from linattn.mixers.registry import register


@register(
    "rodimus",
    title="Rodimus",
    paper="Rodimus*: Breaking the Accuracy-Efficiency Trade-Off with Efficient Attentions",
    arxiv="2410.06577",
    year=2024,
    equation=r"S_t = \mathrm{Diag}(\exp(-g_t \odot \tau_t)) S_{t-1} + (g_t^{\tau_t} \odot k_t)^\top (\beta_t \odot u_t),\quad"
    r" g_t = \mathrm{softplus}(h_t W_g + b),\quad \tau_t = \sigma(h_t W_\tau + c),\quad"
    r" \beta_t = \sigma(u_t W_1 W_2 + d),\quad o_t = q_t S_t + w \odot h_t",
    oracle="fla-core 0.6.0, naive_recurrent_gla; the recurrence token by token in float64",
    chinese={"the recurrence token by token in float64": "float64 下逐 token 递推"},
)
class Rodimus(Mixer):
    """The paper's data-dependent tempered selection: ``state_size`` key channels and ``expand`` dim values, not divided into heads.

    u is the token mapped to the values' width; queries, keys and the gates g and τ come from h, its short convolution with SiLU. Keys
    have unit length, and the input gate β is a map of ``rank`` (None: dim / 64, at least 16). The output, plus h times a weight per
    channel, is multiplied by the SiLU of a gate and then normed, as in fla's layer. The sliding window of Rodimus+ is a layer
    of its own in a hybrid. For the kernels the values are split into heads of at most 128 channels, which share everything else.
    """

    keep_float32 = ("skip",)

    def __init__(
        self, dim: int, *, expand: int = 2, state_size: int = 64, rank: int | None = None, conv_width: int = 4, eps: float = 1e-5
    ) -> None:
        super().__init__(dim)
        rank = max(dim // 64, 16) if rank is None else rank
        at_least(1, expand=expand, state_size=state_size, rank=rank)
        inner = expand * dim
        self.size = math.gcd(inner, 128)
        self.u_proj, self.g_proj = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.conv = ShortConvolution(inner, conv_width, bias=True)
        self.q_proj, self.k_proj = nn.Linear(inner, state_size, bias=False), nn.Linear(inner, state_size, bias=False)
        self.select_proj, self.tau_proj = nn.Linear(inner, state_size), nn.Linear(inner, state_size)
        self.beta_proj = nn.Sequential(nn.Linear(inner, rank, bias=False), nn.Linear(rank, inner))
        self.skip = nn.Parameter(torch.ones(inner, dtype=torch.float32))
        self.norm = HeadNorm(inner, eps=eps)
        self.o_proj = nn.Linear(inner, dim, bias=False)
        self._start_gates(state_size)

    @torch.no_grad()
    def _start_gates(self, state_size: int) -> None:
        """Start with small weights, g spread over [0.001, 0.1] and τ over [1/16, 0.9], as the authors' models do."""
        for gate in (self.select_proj, self.tau_proj, *self.beta_proj):
            nn.init.xavier_uniform_(gate.weight, gain=2**-2.5)
        self.select_proj.bias.copy_(time_steps(state_size))
        self.tau_proj.bias.uniform_(1 / 16, 0.9).logit_()
        self.beta_proj.get_parameter("1.bias").zero_()

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        u = self.u_proj(x)
        h = self.conv(u, call)
        select, tau = to_float32(self.select_proj(h)), to_float32(self.tau_proj(h)).sigmoid()
        k = unit(self.k_proj(h), eps=1e-12) * (tau * log_softplus(select)).exp()
        v, skip = (
            (to_float32(a) * b).unflatten(-1, (-1, self.size)) for a, b in ((u, to_float32(self.beta_proj(u)).sigmoid()), (h, self.skip))
        )
        decay = (-tau * F.softplus(select))[:, :, None].expand(-1, -1, v.shape[2], -1)
        return Recurrence(self.q_proj(h)[:, :, None], k[:, :, None], v, decay=decay, skip=skip)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        gated = to_float32(o).flatten(-2) * F.silu(to_float32(self.g_proj(x)))
        return self.o_proj(self.norm(gated).to(o.dtype))


def log_softplus(x: Tensor) -> Tensor:
    """log log(1 + exp(x)), also where the softplus is 0 in the dtype of ``x``."""
    low = x.clamp(max=-15.0)
    return torch.where(x < -15.0, low - low.exp() / 2, F.softplus(x.clamp(min=-15.0)).log())
