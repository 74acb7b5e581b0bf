"""What attentions to a context share: keys and values of it are kept, and padding of it is not seen."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.base import Recurrence
from linattn.mixers.carry import Carry
from linattn.mixers.kinds import CrossMixer


class Across(CrossMixer):
    """Softmax attention to a context. State: its keys and values, ``k``, ``v`` [B, T, H, ...], and which of them are ``real`` [B, T]."""

    def attend(self, r: Recurrence, carry: Carry) -> Tensor:
        k, v, real = r.k, r.v, carry.written
        if not carry.fresh:
            k, v, real = (cast(Tensor, carry.get(name)) for name in ("k", "v", "real"))
        elif real is None:
            real = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
        for name, t in (("k", k), ("v", v), ("real", real)):
            carry.keep(name, t)
        return self.look(r.q, k, v, real | ~real.any(1, keepdim=True))  # at zeros, where a context has no tokens

    def look(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """What queries q [B, Tq, H, K] get of k [B, T, H, K] and v [B, T, H, V] where ``seen`` [B, T]: [B, Tq, H, V]."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None]).transpose(1, 2)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        return 2 * batch * heads * tokens * r.k.shape[1] * (size + r.v.shape[3])
