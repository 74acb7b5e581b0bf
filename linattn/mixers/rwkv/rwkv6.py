"""RWKV-5 "Eagle" and RWKV-6 "Finch" (arXiv 2404.05892): matrix states with a decay per channel, and a bonus for the current token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import at_least, to_float32
from linattn.mixers.registry import register
from linattn.mixers.rwkv.block import RWKV, GroupNorm, heads_of, previous, ramp, ratios, zigzag

_PAPER = "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence"
_NAMES = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "gate": "g_proj", "output": "o_proj", "ln_x": "norm"}


class _Matrix(RWKV):
    """Base of both: heads with a decay per channel, a bonus u for the current token, a norm per head, a swish gate.

    The initialisation depends on the index ``layer`` of ``layers``; ``depth`` is the first of its :func:`ratios`.
    """

    keep_float32 = ("time_decay", "time_faaaa")

    def __init__(self, dim: int, head_size: int | None, depth: float, eps: float = 64e-5) -> None:
        super().__init__(dim)
        self.heads = heads_of(dim, head_size)
        self.r_proj, self.k_proj, self.v_proj, self.g_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        line = torch.arange(dim) / max(dim - 1, 1)
        self.time_decay = nn.Parameter(-6 + 5 * line ** (0.7 + 1.3 * depth))  # log of the negative log decay
        self.time_faaaa = nn.Parameter((depth * (1 - line) + 0.1 * zigzag(dim)).view(self.heads, -1))  # the bonus u
        self.norm = GroupNorm(self.heads, dim, eps)

    def finish(self, o: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
        (gate,) = beside
        return self.o_proj(self.norm(o).to(gate.dtype) * F.silu(gate))

    def load_rwkv(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of one layer's time mixing, named as in RWKV-LM (``time_decay``, ``receptance.weight``, ...)."""
        known, own = self.state_dict(), {}
        for name, t in weights.items():
            first, dot, rest = name.partition(".")
            name = f"{_NAMES.get(first, first)}{dot}{rest}"
            own[name] = t.reshape(known[name].shape) if name in known else t
        self.load_state_dict(own)


@register(
    "rwkv5",
    title="RWKV-5 (Eagle)",
    paper=_PAPER,
    arxiv="2404.05892",
    year=2024,
    seeds=("000", "001", "003"),
    equation=r"o_t = r_t (S_{t-1} + \mathrm{Diag}(u) k_t^\top v_t),\quad S_t = \mathrm{Diag}(w) S_{t-1} + k_t^\top v_t,\quad"
    r" w = e^{-e^{d}}",
    oracle="rwkv 0.8.32, att_seq_v5_2",
)
class RWKV5(_Matrix):
    """Time mixing of version 5.2, with a learned decay per channel, equal for all tokens.

    Checked against RWKV-LM (RWKV_Tmix_x052); its norm of o / 8 with eps 1e-5 is that of o with 64e-5.
    """

    def __init__(self, dim: int, *, head_size: int | None = None, layer: int = 0, layers: int = 1) -> None:
        depth, almost = ratios(layer, layers)
        super().__init__(dim, head_size, depth)
        self.time_mix_k = nn.Parameter(ramp(dim, almost))
        self.time_mix_v = nn.Parameter(ramp(dim, almost) + 0.3 * depth)
        self.time_mix_r, self.time_mix_g = (nn.Parameter(ramp(dim, 0.5 * almost)) for _ in range(2))

    def tokens(self, x: Tensor, call: CallContext) -> tuple[Recurrence, tuple[Tensor, ...]]:
        before = previous(x, call)
        xk, xv, xr, xg = (torch.lerp(before, x, mix) for mix in (self.time_mix_k, self.time_mix_v, self.time_mix_r, self.time_mix_g))
        r, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)))
        decay = -self.time_decay.exp().view(self.heads, -1)
        return Recurrence(r, k, v, decay=decay, bonus=self.time_faaaa, scale=1.0), (self.g_proj(xg),)


@register(
    "rwkv6",
    title="RWKV-6 (Finch)",
    paper=_PAPER,
    arxiv="2404.05892",
    year=2024,
    seeds=("000", "001", "003", "004"),
    equation=r"o_t = r_t (S_{t-1} + \mathrm{Diag}(u) k_t^\top v_t),\quad S_t = \mathrm{Diag}(w_t) S_{t-1} + k_t^\top v_t,\quad"
    r" w_t = \exp(-\exp(d + \tanh(x^w_t W_1) W_2))",
    oracle="rwkv 0.8.32, att_seq_v6_0; fla-core 0.6.0, naive_recurrent_rwkv6",
)
class RWKV6(_Matrix):
    """Time mixing of version 6.0: decay and token shift are data-dependent.

    Checked against RWKV-LM (RWKV_Tmix_x060): one low-rank map gives the additions to the five mixes, in the order w, k, v, r, g.
    ``eps`` is that of the norm of each head.
    """

    def __init__(
        self, dim: int, *, head_size: int | None = None, layer: int = 0, layers: int = 1, mix_rank: int = 32, decay_rank: int = 64,
        eps: float = 64e-5,
    ) -> None:  # fmt: skip
        depth, almost = ratios(layer, layers)
        super().__init__(dim, head_size, depth, eps)
        for name, power, less in (("x", 1, 0), ("w", 1, 0), ("k", 1, 0), ("v", 1, 0.3 * depth), ("r", 0.5, 0), ("g", 0.5, 0)):
            self.register_parameter(f"time_maa_{name}", nn.Parameter(1 - ramp(dim, power * almost) - less))
        at_least(1, mix_rank=mix_rank, decay_rank=decay_rank)
        self.time_maa_w1 = nn.Parameter(torch.zeros(dim, 5 * mix_rank))
        self.time_maa_w2 = nn.Parameter(torch.empty(5, mix_rank, dim).uniform_(-0.01, 0.01))
        self.time_decay_w1 = nn.Parameter(torch.zeros(dim, decay_rank))
        self.time_decay_w2 = nn.Parameter(torch.empty(decay_rank, dim).uniform_(-0.01, 0.01))

    time_maa_x: nn.Parameter  # [D], like the five mixes
    time_maa_w: nn.Parameter
    time_maa_k: nn.Parameter
    time_maa_v: nn.Parameter
    time_maa_r: nn.Parameter
    time_maa_g: nn.Parameter

    def tokens(self, x: Tensor, call: CallContext) -> tuple[Recurrence, tuple[Tensor, ...]]:
        back = previous(x, call) - x
        low = torch.tanh((x + back * self.time_maa_x) @ self.time_maa_w1).unflatten(-1, (5, -1))
        more = (low.unsqueeze(-2) @ self.time_maa_w2).squeeze(-2)  # [B, T, 5, D]
        mixes = torch.stack([self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g])
        xw, xk, xv, xr, xg = (x[..., None, :] + back[..., None, :] * (mixes + more)).unbind(-2)
        decay = -(self.time_decay + to_float32(torch.tanh(xw @ self.time_decay_w1) @ self.time_decay_w2)).exp()
        r, k, v, decay = (t.unflatten(-1, (self.heads, -1)) for t in (self.r_proj(xr), self.k_proj(xk), self.v_proj(xv), decay))
        return Recurrence(r, k, v, decay=decay, bonus=self.time_faaaa, scale=1.0), (self.g_proj(xg),)
