"""PaTH attention (arXiv 2505.16381): every token between a key and a later query applies a Householder-like transform.

PaTH-FoX has a forget gate as well, which decays the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.attention.scores import PIECE, cached, fading, pieces, softmax, upto
from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, at_least, head_size, to_float32, unit
from linattn.mixers.registry import register


@dataclass(frozen=True, kw_only=True)
class Reflected(Recurrence):
    """``w`` [B, T, H, K], of unit length: the normal of each token's reflection; ``beta`` its strength (2: a full reflection)."""

    w: Tensor


@register(
    "path",
    title="PaTH attention",
    paper="PaTH Attention: Position Encoding via Accumulating Householder Transformations",
    arxiv="2505.16381",
    year=2025,
    equation=r"o_t = \sum_{i \le t} \mathrm{softmax}_i\Big(q_t \prod_{s=t}^{i+1} (I - \beta_s w_s^\top w_s)\, k_i^\top / \sqrt{d}\Big) v_i",
    recurrent=False,
    oracle="fla-core 0.6.0, naive_path_attn",
    chinese={"PaTH attention": "PaTH 注意力"},
)
class PaTH(Mixer):
    """w is a low-rank map of the token through a short convolution and SiLU, of unit length; β = 2 σ(x b + c).

    Every token transforms all earlier keys, so the state is the cache of transformed keys, in float32, and the values. Within
    ``piece`` tokens a triangular system gives the combined transform (the UT form of a product of reflections).

    ``forget`` makes it PaTH-FoX: Σ log f between key and query, f = σ(x a + c) of every token and head, is added to the score before
    the division by √d, as in the authors' code in fla. The state then also has the log decay of each slot so far.
    """

    heads_apart = ()

    piece = PIECE

    def __init__(
        self, dim: int, heads: int = 4, *, rank: int = 32, conv_width: int = 3, qk_norm: bool = False, forget: bool = False
    ) -> None:
        super().__init__(dim)
        self.heads, self.size = heads, head_size("dim", dim, heads)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        at_least(1, rank=rank)
        self.w_proj = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False))
        self.conv = ShortConvolution(dim, conv_width)
        self.b_proj = nn.Linear(dim, heads)
        self.f_proj = nn.Linear(dim, heads) if forget else None
        self.q_norm, self.k_norm = (HeadNorm(self.size) if qk_norm else nn.Identity() for _ in range(2))

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        w = self.conv(self.w_proj(x), call)
        q, k, v, w = (t.unflatten(-1, (self.heads, -1)) for t in (self.q_proj(x), self.k_proj(x), self.v_proj(x), w))
        decay = None if self.f_proj is None else F.logsigmoid(to_float32(self.f_proj(x)))
        return Reflected(self.q_norm(q), self.k_norm(k), v, decay=decay, beta=2 * to_float32(self.b_proj(x)).sigmoid(), w=unit(w))

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, Reflected)
        assert r.beta is not None
        (q, _), (w, _), (beta, _) = (call.to_rows(t) for t in (to_float32(r.q), r.w, r.beta))
        slots, real, before = cached(call, k=to_float32(r.k), v=r.v)
        q, w, k = (t.transpose(1, 2) for t in (q, w, slots["k"]))  # [rows, H, T or slots, K]
        beta, out = beta.mT[..., None], []
        gates = None if r.decay is None else call.to_rows(r.decay)[0]  # [rows, T, H]
        faded = q.new_zeros(call.rows, before, self.heads) if gates is None or call.fresh else cast(Tensor, call.get("faded"))
        for start, stop in pieces(call.tokens, self.piece):
            seen, rest = k[:, :, : before + stop], k[:, :, before + stop :]
            seen, scores = self._piece(q[:, :, start:stop], w[:, :, start:stop], beta[:, :, start:stop], seen, before + start)
            if gates is not None:
                between, faded = fading(gates[:, start:stop], faded)
                scores = scores + between
            out.append(softmax(scores * self.size**-0.5, upto(real, before + start, before + stop), slots["v"][:, : before + stop]))
            k = torch.cat([seen, rest], 2)
        call.keep("k", k.transpose(1, 2))
        if gates is not None:
            call.keep("faded", faded)
        return call.from_rows(torch.cat(out, 1))

    def _piece(self, q: Tensor, w: Tensor, beta: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Scores of the queries in the slots from ``first`` on, and the keys ``k`` [rows, H, slots, K] after them."""
        tokens, slots = q.shape[2], k.shape[2]
        behind = torch.ones(tokens, slots, dtype=torch.bool, device=k.device).tril(first - 1)  # pairs of a key and a later reflection
        met = torch.where(behind, beta * (w @ k.mT), 0.0)  # [rows, H, tokens, slots]: projection of each key on each reflection alone
        each = torch.eye(tokens, dtype=w.dtype, device=w.device) + (beta * (w @ w.mT)).tril(-1)
        taken = torch.linalg.solve_triangular(each, met, upper=False, unitriangular=True)  # projections after the earlier reflections
        return k - taken.mT @ w, q @ k.mT - (q @ w.mT).tril() @ taken

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        pairs = tokens * past + tokens * (tokens + 1) // 2
        return 2 * batch * heads * pairs * (3 * size + r.v.shape[3])  # K by reflections, correction of K, Q by K
