"""HGRN2 (arXiv 2404.07904): a decay α per channel, and keys 1 − α."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, at_least, head_size, to_float32
from linattn.mixers.registry import register


@register(
    "hgrn2",
    title="HGRN2 (gated linear RNN with state expansion)",
    paper="HGRN2: Gated Linear RNNs with State Expansion",
    arxiv="2404.07904",
    year=2024,
    seeds=("004",),
    equation=r"S_t = \mathrm{Diag}(\alpha_t) S_{t-1} + (1 - \alpha_t)^\top v_t,\quad"
    r" \alpha_t = \gamma + (1 - \gamma)\,\sigma(x_t W),\quad o_t = q_t S_t",
    oracle="fla-core 0.6.0, naive_recurrent_gla with keys of 1 - α",
    chinese={
        "HGRN2 (gated linear RNN with state expansion)": "HGRN2（带状态扩展的门控线性 RNN）",
        "naive_recurrent_gla with keys of 1 - α": "naive_recurrent_gla，键取 1 − α",
    },
)
class HGRN2(Mixer):
    """Queries through swish, one RMS norm over all heads; ``head_dim`` is the paper's expansion of the state (128 where it divides dim).

    ``lower_bound`` is γ. In the paper's stack it is learned for all layers together: the first layer has 0, later ones more
    (a cumulative softmax over layers), so that they remember longer. Here it is a buffer [dim], filled with the given number; a model
    gives layer l of L the initial value of that softmax, l / L. Checked against fla's HGRN2Attention: no bias in the gates, q scaled by
    K ** -0.5.
    """

    lower_bound: Tensor
    keep_float32 = ("lower_bound",)

    def __init__(self, dim: int, *, head_dim: int | None = None, lower_bound: float = 0.0) -> None:
        super().__init__(dim)
        size = math.gcd(dim, 128) if head_dim is None else head_dim
        at_least(1, head_dim=size)
        self.heads = dim // head_size("dim", dim, max(dim // size, 1))
        if self.heads * size != dim:
            raise ValueError(f"dim must be a multiple of head_dim = {size}, but came as {dim}")
        self.register_buffer("lower_bound", bound(dim, lower_bound))
        self.q_proj, self.f_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.norm = HeadNorm(dim)

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        return rising(index, count)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        decay, key = forget(self.f_proj(x), self.lower_bound)
        q, k, v, decay = (t.unflatten(-1, (self.heads, -1)) for t in (F.silu(self.q_proj(x)), key, self.v_proj(x), decay))
        return Recurrence(q, k, v, decay=decay)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o.flatten(-2)))


def rising(index: int, count: int) -> dict[str, Any]:
    """The option ``lower_bound`` of layer ``index`` of ``count``: as a cumulative softmax of equal numbers, from 0."""
    return {"lower_bound": index / count}


def bound(dim: int, value: float) -> Tensor:
    """Lower bound of forget gates, equal for ``dim`` channels."""
    if not 0 <= value < 1:
        raise ValueError(f"lower_bound must be at least 0 and less than 1, but came as {value}")
    return torch.full((dim,), float(value), dtype=torch.float32)


def forget(x: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """log α and 1 − α of the forget gate α = γ + (1 − γ) σ(x) for γ = ``lower``, both exact where α is near 0 or 1."""
    x, lower = to_float32(x), lower.to(to_float32(x).dtype)
    new = (1 - lower) * torch.sigmoid(-x)
    strong = torch.logaddexp(x, lower.log()) - F.softplus(x)  # avoids cancellation where α is near 1
    return torch.where(new < 0.5, torch.log1p(-new.clamp(max=0.5)), strong), new
