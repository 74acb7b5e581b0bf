"""DeltaFormer (arXiv 2505.19488): softmax attention with a delta rule that subtracts from a value the past's prediction for its key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.attention.scores import PIECE, cached, pieces, softmax, upto, weights
from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register


@register(
    "deltaformer",
    title="DeltaFormer",
    paper="Understanding Transformer from the Perspective of Associative Memory",
    arxiv="2505.19488",
    year=2025,
    equation=r"u_t = v_t - \beta_t \sum_{i < t} \mathrm{softmax}_{i < t}\big(k_t k_i^\top / \sqrt{d}\big) u_i,\quad"
    r" o_t = \sum_{i \le t} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big) u_i,\quad \beta_t = \sigma(x_t w + b)",
    recurrent=False,
    oracle="fla-core 0.6.0, naive_deltaformer_attn, where queries are keys; the equations token by token in float64",
    chinese={
        "where queries are keys": "其中查询即键",
        "the equations token by token in float64": "float64 下逐 token 计算公式",
    },
)
class DeltaFormer(Softmax):
    """DeltaFormer's layer. State: the cache of keys and, in place of the values, their remainders ``u`` [rows, slots, H, V], in float32.

    Within ``piece`` tokens u is the solution of a triangular system. Both similarities are softmax, that of the first between keys, as in
    the paper. β is in [0, 1], so that u grows at most linearly with the number of tokens; fla's layer has no σ.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        rotary: rotates queries and keys by position.
    """

    packs = False
    piece = PIECE

    def __init__(self, dim: int, heads: int = 4, *, rotary: bool = True) -> None:
        super().__init__(dim, heads, rotated=None if rotary else 0)
        self.b_proj = nn.Linear(dim, heads)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().project(x, call)
        return Recurrence(r.q, r.k, r.v, beta=to_float32(self.b_proj(x)).sigmoid())

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert r.beta is not None
        slots, real, before = cached(call, k=r.k, u=to_float32(r.v))
        u, out = slots["u"][:, :before], []
        for start, stop in pieces(call.tokens, self.piece):
            first, last = before + start, before + stop
            k, seen = to_float32(slots["k"][:, :last]), upto(real, first, last)
            past = seen & torch.ones(stop - start, last, dtype=torch.bool, device=k.device).tril(first - 1)
            met = r.beta[:, start:stop].mT[..., None] * weights(self._scores(k[:, first:], k), past[:, None])
            u = torch.cat([u, _left(slots["u"][:, first:last], u, met)], 1)
            out.append(softmax(self._scores(to_float32(r.q[:, start:stop]), k), seen, u))
        call.keep("u", u)
        return torch.cat(out, 1).to(r.v.dtype)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("rthk,rshk->rhts", q, k) * self.size**-0.5

    def attend_flops(self, r: Recurrence, past: int) -> int:
        return 2 * super().attend_flops(r, past)


def _left(v: Tensor, u: Tensor, met: Tensor) -> Tensor:
    """Remainders of values v [rows, T, H, V]: ``met`` [rows, H, T, slots + T] is the share of u [rows, slots, H, V], and of the remainders
    before, that is subtracted from each.
    """
    old, own = met.split((u.shape[1], v.shape[1]), -1)
    rest = v.transpose(1, 2) - old @ u.transpose(1, 2)
    return torch.linalg.solve_triangular(own, rest, upper=False, unitriangular=True).transpose(1, 2)
