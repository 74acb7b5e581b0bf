"""Base of attentions that differ from softmax attention only in how scores become weights."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.mixers.attention.scores import PIECE, cached, pieces, upto
from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32


class Weighed(Softmax):
    """Softmax attention with :meth:`weights` of a subclass; state, positions and parameters are those of ``softmax``."""

    packs = False
    piece = PIECE

    def __init__(self, dim: int, heads: int = 4, *, causal: bool = True, rotary: bool = True) -> None:
        super().__init__(dim, heads, rotated=None if rotary else 0, causal=causal)

    def weights(self, scores: Tensor) -> Tensor:
        """Weights for scores [rows, H, T, slots], -inf where a slot is hidden: the same shape, each row adding up to 1."""
        raise NotImplementedError(f"{type(self).__name__} must implement weights(scores)")

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        slots, real, before = cached(call, k=r.k, v=r.v)
        if not self.causal and call.valid is not None:
            real = call.valid | (call.counts == 0)[:, None]
        out = []
        for start, stop in pieces(call.tokens, self.piece):
            last = before + stop if self.causal else call.tokens
            seen = upto(real, before + start, last) if self.causal else real[:, None]
            k, v = (slots[name][:, :last] for name in ("k", "v"))
            scores = torch.einsum("rthk,rshk->rhts", to_float32(r.q[:, start:stop]), to_float32(k)) * self.size**-0.5
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            weights = self.weights(scores) if scores.shape[-1] else scores
            out.append(torch.einsum("rhts,rshv->rthv", weights, to_float32(v)).to(v.dtype))
        return torch.cat(out, 1)
