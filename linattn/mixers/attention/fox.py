"""Forgetting attention (arXiv 2503.02130): softmax attention whose scores decay by a gate of every token in between."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.attention.scores import PIECE, cached, fading, pieces, softmax, upto
from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, head_size, to_float32
from linattn.mixers.registry import register


@register(
    "fox",
    title="Forgetting Transformer",
    paper="Forgetting Transformer: Softmax Attention with a Forget Gate",
    arxiv="2503.02130",
    year=2025,
    equation=r"o_t = \sum_{i \le t} \mathrm{softmax}_i\Big(q_t k_i^\top / \sqrt{d} + \sum_{l=i+1}^{t} \log f_l\Big) v_i,"
    r"\quad f_t = \sigma(x_t w + b)",
    recurrent=False,
    oracle="fla-core 0.6.0, naive_forgetting_attn",
)
class FoX(Mixer):
    """Attention in which gates replace positions. State: the cache, and the log decay of each slot so far.

    ``pro`` is the paper's larger block: keys and values mixed with the last token's by a gate per head, RMS norm on queries and
    keys, and RMS norm and a sigmoid gate on the output; without it the block is the plain one. Checked against the authors'
    repository: keys are shifted first and normed afterwards, the gate of the shift weighs the *last* token.
    """

    heads_apart = ()

    piece = PIECE

    def __init__(self, dim: int, heads: int = 4, *, pro: bool = True) -> None:
        super().__init__(dim)
        self.heads, self.pro, self.size = heads, pro, head_size("dim", dim, heads)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.f_proj = nn.Linear(dim, heads)
        if pro:
            self.k_shift, self.v_shift = nn.Linear(dim, heads, bias=False), nn.Linear(dim, heads, bias=False)
            self.q_norm, self.k_norm = HeadNorm((heads, self.size)), HeadNorm((heads, self.size))
            self.norm = HeadNorm((heads, self.size), eps=1e-6)
            self.g_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.pro:
            k, v = self._shifted("k_last", k, self.k_shift(x), call), self._shifted("v_last", v, self.v_shift(x), call)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))
        if self.pro:
            q, k = self.q_norm(q), self.k_norm(k)
        return Recurrence(q, k, v, decay=F.logsigmoid(to_float32(self.f_proj(x))))

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert r.decay is not None
        (q, _), (f, _) = call.to_rows(r.q), call.to_rows(r.decay)
        slots, real, before = cached(call, k=r.k, v=r.v)
        faded, out = call.get("faded"), []
        faded = f[:, :0] if faded is None else faded  # [rows, slots, H]: sum of the gates after each slot
        for start, stop in pieces(call.tokens, self.piece):
            last = before + stop
            between, faded = fading(f[:, start:stop], faded)
            scores = torch.einsum("rthk,rshk->rhts", to_float32(q[:, start:stop]), to_float32(slots["k"][:, :last])) * self.size**-0.5
            out.append(softmax(scores + between, upto(real, before + start, last), slots["v"][:, :last]))
        call.keep("faded", faded)
        return call.from_rows(torch.cat(out, 1))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        if self.pro:
            o = (to_float32(self.norm(o)) * to_float32(self.g_proj(x)).sigmoid().unflatten(-1, (self.heads, -1))).to(o.dtype)
        return self.o_proj(o.flatten(-2))

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        return 2 * batch * heads * (tokens * past + tokens * (tokens + 1) // 2) * (size + r.v.shape[3])

    def _shifted(self, name: str, x: Tensor, gate: Tensor, call: CallContext) -> Tensor:
        """Mix ``x`` [B, T, D] with the token before it by a gate per head."""
        longer, places = call.context(name, x, 1)
        last = longer[:, :-1] if places is None else longer.index_select(1, places - 1)
        weight = to_float32(gate).sigmoid().repeat_interleave(self.size, -1)
        return (weight * to_float32(last) + (1 - weight) * to_float32(x)).to(x.dtype)
