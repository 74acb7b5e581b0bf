"""Raven (2026): gated slot attention in which every token writes to the slots that a router chooses, and only these decay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.decay.gsa import SlotMemory, Slots
from linattn.mixers.parts import HeadNorm, head_size, time_steps, to_float32
from linattn.mixers.registry import register


@register(
    "raven",
    title="Raven (routed slots)",
    paper="Raven: Memory as a Set of Slots",
    year=2026,
    equation=r"\tilde K_t = \mathrm{Diag}(\alpha_t) \tilde K_{t-1} + (1 - \alpha_t)^\top k_t,\quad"
    r" \tilde V_t = \mathrm{Diag}(\alpha_t) \tilde V_{t-1} + (1 - \alpha_t)^\top v_t,\quad"
    r" o_t = \mathrm{softmax}(q_t \tilde K_t^\top) \tilde V_t,\quad"
    r" \alpha_t = \exp\big(-e^{A}\,\mathrm{softplus}(x_t w + b)\, r_t\big),\quad r_t = \mathrm{norm}(\mathrm{top}_n\, \sigma(x_t W))",
    oracle="fla-core 0.6.0, naive_recurrent_gsa; the recurrence token by token in float64",
    chinese={"Raven (routed slots)": "Raven（路由槽）", "the recurrence token by token in float64": "float64 下逐 token 递推"},
)
class Raven(SlotMemory):
    """The ``active`` slots of ``slots`` with the largest scores share a token's decay by their scores, and are written with 1 minus
    their decay factor; the others are unchanged.

    Swish and RMS norm on q and k, swish on v, no positions; swish and one RMS norm over all heads on the output, as in the
    authors' layer in fla. That adds Gumbel noise to the scores while it trains; here they are the same in training.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        slots: slots of every head.
        active: how many of them a token writes to.
        eps: of the norms.
    """

    keep_float32 = ("A_log", "dt_bias")

    def __init__(self, dim: int, heads: int = 4, *, slots: int = 64, active: int = 32, eps: float = 1e-5) -> None:
        super().__init__(dim)
        size = head_size("dim", dim, heads)
        if not 1 <= active <= slots:
            raise ValueError(f"active must be from 1 to slots = {slots}, but came as {active}")
        self.heads, self.active = heads, active
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.router = nn.Linear(dim, heads * slots, bias=False)
        self.a_proj = nn.Linear(dim, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(time_steps(heads))
        self.q_norm, self.k_norm, self.norm = HeadNorm(size, eps=eps), HeadNorm(size, eps=eps), HeadNorm(dim, eps=eps)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (F.silu(p(x)).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        decay = -self.A_log.exp() * F.softplus(to_float32(self.a_proj(x)) + self.dt_bias)
        fade = decay[..., None] * self.routed(x)
        return Slots(self.q_norm(q), self.k_norm(k), v, fade=fade, write=-torch.expm1(fade), scale=1.0)

    def routed(self, x: Tensor) -> Tensor:
        """The shares of the slots that each token writes to, [B, T, H, slots], 0 for the others."""
        scores = to_float32(self.router(x)).unflatten(-1, (self.heads, -1)).sigmoid()
        best, index = scores.topk(self.active, -1)
        return torch.zeros_like(scores).scatter(-1, index, best / (best.sum(-1, keepdim=True) + 1e-9))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(F.silu(o).flatten(-2)))
