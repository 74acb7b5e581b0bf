"""Mamba-2 (arXiv 2405.21060): the state-space model whose transition is one number per head and token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, at_least, head_size, time_steps, to_float32
from linattn.mixers.registry import register

_OWN = {"mva": "x", "mvs": "x", "mqa": "C", "mka": "B", "mha": "xBC"}  # tensors with separate heads


@register(
    "mamba2",
    title="Mamba-2 (state space duality)",
    paper="Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality",
    arxiv="2405.21060",
    year=2024,
    seeds=("000", "001", "003", "004"),
    equation=r"S_t = e^{\Delta_t A} S_{t-1} + B_t^\top (\Delta_t x_t),\quad \Delta_t = \mathrm{softplus}(x_t w + b),\quad"
    r" o_t = C_t S_t + D x_t",
    oracle="transformers, Mamba2Mixer",
    families=("state spaces",),
    chinese={"Mamba-2 (state space duality)": "Mamba-2（状态空间对偶）"},
)
class Mamba2(Mixer):
    """In terms of attention C is the query, B the key and Δx the value; ``groups`` heads of B and C serve all heads of x.

    Short convolution and SiLU on x, B and C; the gate comes before the norm, as in the paper's code.

    ``pattern`` selects the tensors with separate heads, the others being shared by all heads (section 7.2 of the paper); decays are
    always separate: ``"mva"`` or ``"mvs"`` x (multi-value attention or SSM: the paper's choice), ``"mqa"`` C (multi-query, multi-contract),
    ``"mka"`` B (multi-key, multi-expand), ``"mha"`` all three, which is ``groups`` = heads.

    ``eps`` is the norm's; ``step_limits`` are the lowest and the highest value that a time step Δ may take.
    """

    heads_apart = ("in_proj: widths heads", "conv: widths")

    keep_float32 = ("A_log", "dt_bias")

    def __init__(
        self, dim: int, *, expand: int = 2, head_dim: int = 64, state_size: int = 128, groups: int = 1, conv_width: int = 4,
        pattern: str = "mva", eps: float = 1e-5, step_limits: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        if step_limits is not None and (len(step_limits) != 2 or not 0 <= step_limits[0] <= step_limits[1]):
            raise ValueError(f"step_limits must be two numbers 0 <= low <= high, but came as {step_limits!r}")
        self.step_limits = step_limits
        at_least(1, expand=expand, head_dim=head_dim, state_size=state_size)
        self.inner, self.state_size = expand * dim, state_size
        if self.inner % head_dim:
            raise ValueError(f"expand * dim must be a multiple of head_dim = {head_dim}, but is {self.inner}")
        self.heads = self.inner // head_dim
        head_size("the number of heads, expand * dim / head_dim,", self.heads, groups)
        if pattern not in _OWN:
            raise ValueError(f"pattern must be one of {', '.join(map(repr, _OWN))}, but came as {pattern!r}")
        if groups != 1 and _OWN[pattern] != "x":
            raise ValueError(f"groups are for pattern 'mva', but came as {groups} with pattern {pattern!r}")
        self.groups = self.heads if pattern == "mha" else groups
        own = [self.heads if name in _OWN[pattern] else self.groups for name in "xBC"]
        self.widths = own[0] * head_dim, own[1] * state_size, own[2] * state_size  # of x, B, C
        self.convolved = sum(self.widths)
        self.in_proj = nn.Linear(dim, self.convolved + self.heads, bias=False)  # x, B, C, Δ
        self.g_proj = nn.Linear(dim, self.inner, bias=False)
        self.conv = ShortConvolution(self.convolved, conv_width, bias=True)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(time_steps(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = HeadNorm((self.groups, self.inner // self.groups), eps=eps)
        self.o_proj = nn.Linear(self.inner, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        xbc, dt = self.in_proj(x).split((self.convolved, self.heads), -1)
        x, b, c = self.conv(xbc, call).split(self.widths, -1)
        x = x.unflatten(-1, (-1, self.inner // self.heads)).expand(-1, -1, self.heads, -1)  # [B, T, H, P]
        b, c = (t.unflatten(-1, (-1, self.state_size)) for t in (b, c))
        shared = max(b.shape[2], c.shape[2])
        b, c = (t.expand(-1, -1, shared, -1) for t in (b, c))
        dt = F.softplus(to_float32(dt) + self.dt_bias)  # [B, T, H]
        dt = dt if self.step_limits is None else dt.clamp(*self.step_limits)
        return Recurrence(c, b, x * dt[..., None], decay=-self.A_log.exp() * dt, scale=1.0, skip=x * self.D[:, None])

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        gated = to_float32(o).flatten(-2) * F.silu(to_float32(self.g_proj(x)))
        return self.o_proj(self.norm(gated.unflatten(-1, (self.groups, -1))).flatten(-2).to(o.dtype))
