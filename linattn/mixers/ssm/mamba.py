"""Mamba (arXiv 2312.00752): a selective state-space model, whose transition is one number per channel, state entry and token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import ShortConvolution, at_least, time_steps, to_float32
from linattn.mixers.registry import register
from linattn.ops import selective_scan


@register(
    "mamba",
    title="Mamba (selective state space)",
    paper="Mamba: Linear-Time Sequence Modeling with Selective State Spaces",
    arxiv="2312.00752",
    year=2023,
    seeds=("000", "001", "003", "004"),
    equation=r"h_t = e^{\Delta_t A} \odot h_{t-1} + \Delta_t x_t B_t,\quad \Delta_t = \mathrm{softplus}(x_t W_1 W_2 + b),\quad"
    r" y_t = h_t C_t + D \odot x_t",
    oracle="transformers, MambaMixer and FalconMambaMixer",
    chinese={
        "Mamba (selective state space)": "Mamba（选择性状态空间）",
        "MambaMixer and FalconMambaMixer": "MambaMixer 与 FalconMambaMixer",
    },
)
class Mamba(Mixer):
    """The paper's block: short convolution and SiLU on x, its scan, a swish gate. Every channel is a head with a value of size 1.

    Run by :func:`linattn.selective_scan`; :meth:`project` expresses it as the general recurrence, where the decay
    is a tensor [B, T, expand · dim, state_size], for inspection.

    ``norms`` puts RMS norms without weights on B, C and the low-rank Δ, as Falcon Mamba does (arXiv 2410.05355).
    """

    shards = True

    keep_float32 = ("A_log", "dt_bias")

    def __init__(
        self, dim: int, *, expand: int = 2, state_size: int = 16, rank: int | None = None, conv_width: int = 4, norms: bool = False
    ) -> None:
        super().__init__(dim)
        self.inner, self.state_size, self.norms = expand * dim, state_size, norms
        self.rank = -(-dim // 16) if rank is None else rank
        at_least(1, expand=expand, state_size=state_size, rank=self.rank)
        self.in_proj, self.g_proj = nn.Linear(dim, self.inner, bias=False), nn.Linear(dim, self.inner, bias=False)
        self.conv = ShortConvolution(self.inner, conv_width, bias=True)
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * state_size, bias=False)  # Δ, B, C
        self.dt_proj = nn.Linear(self.rank, self.inner, bias=False)
        nn.init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        self.dt_bias = nn.Parameter(time_steps(self.inner))
        self.A_log = nn.Parameter(torch.arange(1, state_size + 1, dtype=torch.float32).log().repeat(self.inner, 1))
        self.D = nn.Parameter(torch.ones(self.inner))
        self.o_proj = nn.Linear(self.inner, dim, bias=False)

    def select(self, x: Tensor, call: CallContext) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the scan: x and Δ [B, T, inner], A [inner, N], B and C [B, T, N]."""
        x = self.conv(self.in_proj(x), call)
        dt, b, c = self.x_proj(x).split((self.rank, self.state_size, self.state_size), -1)
        if self.norms:
            dt, b, c = (F.rms_norm(to_float32(t), t.shape[-1:], eps=1e-6).to(x.dtype) for t in (dt, b, c))
        return x, F.softplus(to_float32(self.dt_proj(dt)) + self.dt_bias), -self.A_log.exp(), b, c

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        u, dt, a, b, c = self.select(x, call)
        if call.valid is not None:
            dt = torch.where(call.valid[..., None], dt, 0.0)
        y, h = selective_scan(
            u, dt, a, b.to(u.dtype), c.to(u.dtype), to_float32(self.D),
            initial_state=call.get("h"), return_state=True, cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        call.keep("h", h)
        return self.read(y[..., None], x)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        x, dt, a, b, c = self.select(x, call)
        skip = (x * self.D)[..., None]
        return Recurrence(c[:, :, None], b[:, :, None], (dt * x)[..., None], decay=dt[..., None] * a, scale=1.0, skip=skip)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o[..., 0] * F.silu(self.g_proj(x)))
