"""Parallax (arXiv 2605.29157): softmax attention minus a learned probe times the covariance of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linattn.mixers.attention.scores import PIECE, cached, pieces, upto, weights
from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register


@dataclass(frozen=True, kw_only=True)
class Probed(Recurrence):
    """``probe`` ρ [B, T, H, K], beside the query."""

    probe: Tensor


@register(
    "parallax",
    title="Parallax (local linear attention)",
    paper="Parallax: Parameterized Local Linear Attention for Language Modeling",
    arxiv="2605.29157",
    year=2026,
    equation=r"o_t = \sum_{i \le t} p_{ti} \Big(1 - \rho_t \big(k_i - \sum_{j \le t} p_{tj} k_j\big)^\top\Big) v_i,\quad"
    r" p_{ti} = \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big)",
    recurrent=False,
    oracle="fla-core 0.6.0, naive_parallax; the mean less the probed covariance in float64",
    chinese={
        "Parallax (local linear attention)": "Parallax（局部线性注意力）",
        "the mean less the probed covariance in float64": "float64 下均值减去探针作用后的协方差",
    },
)
class Parallax(Softmax):
    """Softmax attention fits a constant around the query, this a line: o = E v - ρ Cov(k, v), both under the weights p.

    Local linear attention solves for ρ; here it is a projection of the token, rotated like the query, but not scaled. With ρ = 0
    it is softmax attention. State: that of ``softmax``.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        rotary: rotates queries, probes and keys by position.
    """

    packs = False
    piece = PIECE

    def __init__(self, dim: int, heads: int = 4, *, rotary: bool = True) -> None:
        super().__init__(dim, heads, rotated=None if rotary else 0)
        self.probe_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r, probe = super().project(x, call), self.probe_proj(x).unflatten(-1, (self.heads, -1))
        return Probed(r.q, r.k, r.v, probe=self._turned(probe, self.angles(x, call)) if self.rotated else probe)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, Probed)
        slots, real, before = cached(call, k=r.k, v=r.v)
        out = []
        for start, stop in pieces(call.tokens, self.piece):
            last = before + stop
            k, seen = to_float32(slots["k"][:, :last]), upto(real, before + start, last)[:, None]
            scores, probed = (torch.einsum("rthk,rshk->rhts", to_float32(t[:, start:stop]), k) for t in (r.q, r.probe))
            p = weights(scores * self.size**-0.5, seen)
            p = p * (1 - probed + (p * probed).sum(-1, keepdim=True))
            out.append(torch.einsum("rhts,rshv->rthv", p, to_float32(slots["v"][:, :last])).to(r.v.dtype))
        return torch.cat(out, 1)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        pairs = tokens * past + tokens * (tokens + 1) // 2
        return 2 * batch * heads * pairs * (2 * size + r.v.shape[3])
