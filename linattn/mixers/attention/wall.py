"""Wall attention (Tilde Research, 2026): softmax attention whose keys decay per channel, by a gate of every token in between."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.attention.scores import cached, pieces, softmax, upto
from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register


@register(
    "wall",
    title="Wall attention",
    paper="Wall Attention: Length Generalization With Diagonal Gates",
    year=2026,
    equation=r"o_t = \sum_{i \le t} \mathrm{softmax}_i\Big(q_t \prod_{l=i+1}^{t} \mathrm{Diag}(\alpha_l)\, k_i^\top / \sqrt{d}\Big) v_i,"
    r"\quad \alpha_t = \sigma(x_t W + b)",
    recurrent=False,
    oracle="fla-core 0.6.0, naive_wall_attn; the products of the equation pair by pair in float64",
    chinese={
        "Wall attention": "Wall 注意力",
        "the products of the equation pair by pair in float64": "float64 下逐对计算公式中的乘积",
    },
)
class Wall(Softmax):
    """Gates replace positions: if all are 1, as approximately at initialisation, it is softmax attention without positions.

    State: the cache, whose keys are scaled by the gates up to the last token, in float32, ``k`` [rows, slots, H, K].

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
    """

    packs = False
    piece = 32  # tokens for whose pairs a decay per channel is formed

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__(dim, heads, rotated=0)
        self.decay_proj = nn.Linear(dim, dim)
        nn.init.constant_(self.decay_proj.bias, 8.0)  # as the authors': weak decay at first

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().project(x, call)
        return Recurrence(r.q, r.k, r.v, decay=F.logsigmoid(to_float32(self.decay_proj(x))).unflatten(-1, (self.heads, -1)))

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert r.decay is not None
        slots, real, before = cached(call, k=to_float32(r.k), v=r.v)
        k, out = slots["k"][:, :before], []
        for start, stop in pieces(call.tokens, self.piece):
            q, new, gates = to_float32(r.q[:, start:stop]), slots["k"][:, before + start : before + stop], r.decay[:, start:stop]
            scores, k = _faded(q, k, new, gates)
            seen = upto(real, before + start, before + stop)
            out.append(softmax(scores * self.size**-0.5, seen, slots["v"][:, : before + stop]))
        call.keep("k", k)
        return torch.cat(out, 1)


def _faded(q: Tensor, k: Tensor, new: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [rows, H, T, slots + T] of a piece's queries q [rows, T, H, K] with the keys k [rows, slots, H, K] before it and its own
    ``new`` [rows, T, H, K], by ``gates`` [rows, T, H, K] in logarithms; and all keys as they stand after it.

    Gates between two of its own tokens are summed directly; a difference of two sums would lose digits.
    """
    tokens = q.shape[1]
    behind = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril(-1)
    own = torch.where(behind[..., None, None], gates[:, :, None], 0.0)  # [rows, queries, keys, H, K]
    past = torch.einsum("rthk,rshk->rhts", q * gates.cumsum(1).exp(), k)
    near = (q[:, :, None] * own.cumsum(1).exp() * new[:, None]).sum(-1)  # [rows, queries, keys, H]
    k = torch.cat([k * gates.sum(1, keepdim=True).exp(), new * own.sum(1).exp()], 1)
    return torch.cat([past, near.permute(0, 3, 1, 2)], -1), k
