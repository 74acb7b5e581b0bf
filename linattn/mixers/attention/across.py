"""Base of cross attention: keys and values of the context are cached, its padding is masked."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from linattn.mixers.attention.scores import PIECE, pieces, softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kinds import CrossMixer
from linattn.mixers.parts import to_float32
from linattn.ops.checks import no_autocast


class Across(CrossMixer):
    """Softmax attention to a context. State: its keys and values, ``k``, ``v`` [B, T, H, ...], and which of them are ``real`` [B, T]."""

    piece = PIECE

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        k, v, real = r.k, r.v, call.written
        if not call.fresh:
            k, v, real = (cast(Tensor, call.get(name)) for name in ("k", "v", "real"))
        elif real is None:
            real = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        for name, t in (("k", k), ("v", v), ("real", real)):
            call.keep(name, t)
        return self.attend_context(r.q, k, v, real | ~real.any(1, keepdim=True))  # an empty context is padded with a zero

    def attend_context(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Attention of queries q [B, Tq, H, K] to k [B, T, H, K] and v [B, T, H, V] where ``seen`` [B, T]: [B, Tq, H, V].

        The weights are saved for backward, in float32 at least. Torch's fused attention recomputes them as exp(score - logsumexp), but
        scores of raw features are unbounded: from about 1e9 on two roundings of a score differ by more than 88, and that exponential
        overflows.
        """
        means = []
        with no_autocast(q):
            for start, stop in pieces(q.shape[1], self.piece):
                scores = torch.einsum("bthk,bshk->bhts", to_float32(q[:, start:stop]), to_float32(k)) * q.shape[-1] ** -0.5
                means.append(softmax(scores, seen[:, None], v))
        return torch.cat(means, 1)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        return 2 * batch * heads * tokens * r.k.shape[1] * (size + r.v.shape[3])
