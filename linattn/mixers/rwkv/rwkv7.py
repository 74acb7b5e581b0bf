"""RWKV-7 "Goose" (arXiv 2503.14456): a decay per channel, and data-dependent erasure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import at_least, to_float32
from linattn.mixers.registry import register
from linattn.mixers.rwkv.block import RWKV, GroupNorm, heads_of, previous, ramp, ratios

_MIXES = {"x_r": 0.2, "x_w": 0.9, "x_k": 0.7, "x_v": 0.7, "x_a": 0.9, "x_g": 0.2}  # powers of their initial ramps


@register(
    "rwkv7",
    title="RWKV-7 (Goose)",
    paper='RWKV-7 "Goose" with Expressive Dynamic State Evolution',
    arxiv="2503.14456",
    year=2025,
    seeds=("000", "001", "003"),
    equation=r"S_t = \mathrm{Diag}(w_t) S_{t-1} - (a_t \odot \kappa_t)^\top (\kappa_t S_{t-1}) + k_t^\top v_t,\quad"
    r" w_t = \exp(-e^{-1/2} \sigma(x^w_t W_1 \ldots)),\quad o_t = r_t S_t",
    oracle="rwkv 0.8.32, RWKV_x070_TMix_seq and, for a whole model, RWKV_x070",
    chinese={"rwkv {}, RWKV_x070_TMix_seq and, for a whole model, RWKV_x070": "rwkv {}，RWKV_x070_TMix_seq；整个模型用 RWKV_x070"},
)
class RWKV7(RWKV):
    """Time mixing. Six mixes of a token with the previous one give r, the decay w, k, v, the rate a and the gate g.

    κ is k ⊙ ``k_k`` of unit length in each head; what is written is k ⊙ (1 + (a − 1) ⊙ ``k_a``). After the norm of each head
    (r · k ⊙ ``r_k``) v is added, then comes the gate. Checked against the project's numpy reference (rwkv_v7_numpy.py) and its training
    code, whose initialisation this is.

    ``value_residual``: v is interpolated towards the values of the stack's first layer, by σ(``v0`` + x^v ``v1`` ``v2``) per
    channel. A model switches it on in all RWKV-7 layers but its first, and passes that one's values on [B, T, H, V]; they are
    values of the same tokens, so no state holds them. The initialisation depends on the place in a stack, ``layer`` of
    ``layers``. ``rank`` is that of the low-rank maps, or a dict for those called w, a, g and v; ``eps`` is that
    of the norm of each head.
    """

    keep_float32 = ("w0",)
    shares = True

    def __init__(
        self, dim: int, *, head_size: int | None = None, layer: int = 0, layers: int = 1, rank: int | dict[str, int] | None = None,
        value_residual: bool = False, eps: float = 64e-5,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        depth, almost = ratios(layer, layers)
        self.heads, self.value_residual = heads_of(dim, head_size), value_residual
        size = dim // self.heads
        for name, power in _MIXES.items():
            self.register_parameter(name, nn.Parameter(1 - ramp(dim, power * almost)))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        for linear, scale in ((self.r_proj, 0.5), (self.k_proj, 0.05), (self.v_proj, 0.5)):
            nn.init.uniform_(linear.weight, -scale * dim**-0.5, scale * dim**-0.5)
        nn.init.zeros_(self.o_proj.weight)
        line = torch.arange(dim) / max(dim - 1, 1)
        bend = (torch.arange(dim) % size) / max(size - 1, 1) * 2 - 1
        bend = bend * bend.abs()
        self.w0 = nn.Parameter(-5.5 + 6 * line ** (1 + depth**0.3) + 2.5 * bend)
        self.a0 = nn.Parameter(-0.19 + 0.3 * bend + 0.4 * (line - 0.5))
        if value_residual:
            self.v0 = nn.Parameter(0.73 - 0.4 * (line - 0.5))
        for name, factor in (("w", 2.5), ("a", 2.5), ("g", 5.0), *([("v", 1.7)] if value_residual else [])):
            width = rank.get(name) if isinstance(rank, dict) else rank
            width = max(32, round(factor * math.sqrt(dim) / 32) * 32) if width is None else width
            at_least(1, rank=width)
            self.register_parameter(f"{name}1", nn.Parameter(torch.zeros(dim, width)))
            self.register_parameter(f"{name}2", nn.Parameter(nn.init.orthogonal_(torch.empty(width, dim), gain=_gain(width, dim))))
        self.k_k = nn.Parameter(0.71 - 0.1 * (line - 0.5))
        self.k_a = nn.Parameter(torch.full((dim,), 1.02))
        self.r_k = nn.Parameter(torch.full((self.heads, size), -0.04))
        self.norm = GroupNorm(self.heads, dim, eps)

    x_r: nn.Parameter  # [D], like the other mixes
    x_w: nn.Parameter
    x_k: nn.Parameter
    x_v: nn.Parameter
    x_a: nn.Parameter
    x_g: nn.Parameter
    w1: nn.Parameter  # [D, rank], and below [rank, D]
    w2: nn.Parameter
    a1: nn.Parameter
    a2: nn.Parameter
    g1: nn.Parameter
    g2: nn.Parameter
    v1: nn.Parameter
    v2: nn.Parameter

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        return super().placed(index, count) | {"value_residual": index > 0}

    def example_shared(self, x: Tensor) -> Tensor | None:
        return x.new_zeros(*x.shape[:2], self.heads, x.shape[2] // self.heads) if self.value_residual else None

    def tokens(self, x: Tensor, call: CallContext) -> tuple[Recurrence, tuple[Tensor, ...]]:
        back = previous(x, call) - x
        xr, xw, xk, xv, xa, xg = (x + back * mix for mix in (self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g))
        split = lambda t: t.unflatten(-1, (self.heads, -1))  # noqa: E731
        r, k, v = split(self.r_proj(xr)), self.k_proj(xk), self._values(xv, call)
        decay = -math.exp(-0.5) * (self.w0 + to_float32(torch.tanh(xw @ self.w1) @ self.w2)).sigmoid()
        rate = (to_float32(self.a0) + to_float32(xa @ self.a1 @ self.a2)).sigmoid()
        kappa = F.normalize(split(to_float32(k) * self.k_k), dim=-1)
        k = split((to_float32(k) * (1 + (rate - 1) * self.k_a)).to(v.dtype))
        own = (to_float32(r) * to_float32(k) * self.r_k).sum(-1, keepdim=True) * to_float32(v)
        gate = (xg @ self.g1).sigmoid() @ self.g2
        erase = (-kappa, kappa * split(rate))
        return Recurrence(r, k, v, decay=split(decay), erase=erase, scale=1.0), (own.flatten(-2), gate)

    def _values(self, xv: Tensor, call: CallContext) -> Tensor:
        """Values [B, T, H, V]; passes on those of the first layer."""
        v, first = self.v_proj(xv).unflatten(-1, (self.heads, -1)), call.shared
        if first is None:
            call.shared = v
        if not self.value_residual:
            return v
        if first is None:
            raise ValueError("shared must be the first layer's values [B, T, H, V] where value_residual is true, but came as None")
        amount = (to_float32(self.v0) + to_float32(xv @ self.v1 @ self.v2)).sigmoid().view_as(v)
        return torch.lerp(to_float32(v), to_float32(first), amount).to(v.dtype)

    def finish(self, o: Tensor, beside: tuple[Tensor, ...]) -> Tensor:
        own, gate = beside
        return self.o_proj((to_float32(self.norm(o)) + own).to(gate.dtype) * gate)

    def load_rwkv(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of one layer's time mixing, named as in RWKV-LM (``x_r``, ``receptance.weight``, ``ln_x.weight``, ...)."""
        names = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "norm"}
        known = self.state_dict()
        own = {f"{names.get(name.split('.')[0], name.split('.')[0])}{name[len(name.split('.')[0]) :]}": t for name, t in weights.items()}
        self.load_state_dict({name: t.view(known[name].shape) for name, t in own.items() if name in known})


def _gain(rows: int, columns: int) -> float:
    return 0.1 * math.sqrt(max(rows / columns, 1.0))
