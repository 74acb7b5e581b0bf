"""Linformer (arXiv 2006.04768): keys and values are mixed along the sequence into a fixed number of slots."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.memory.attention import BesideSoftmax, check_least, softmax_attention
from linattn.mixers.registry import register


@register(
    "linformer",
    title="Linformer",
    paper="Linformer: Self-Attention with Linear Complexity",
    arxiv="2006.04768",
    year=2020,
    seeds=("001",),
    causal=False,
    equation=r"O = \mathrm{softmax}\big(Q (E^\top K)^\top / \sqrt{d}\big)\, F^\top V,\quad E, F \in \mathbb{R}^{n \times k}",
    oracle="linformer 0.2.3, LinformerSelfAttention",
    families=("low rank",),
)
class Linformer(BesideSoftmax):
    """E and F are parameters, shared by all heads, with ``slots`` = k columns and a row for each of at most ``length`` tokens.

    A shorter sequence takes the first rows, so a token's position is in what it writes. ``shared``: F is E. A longer sequence is refused:
    its last tokens have no parameters. Not causal: every slot mixes all tokens.
    """

    def __init__(self, dim: int, heads: int = 4, *, slots: int = 128, length: int = 16384, shared: bool = False) -> None:
        super().__init__(dim, heads)
        check_least(1, slots=slots, length=length)
        self.length = length
        self.proj_k = nn.Parameter(torch.empty(length, slots).uniform_(-(slots**-0.5), slots**-0.5))
        self.proj_v = None if shared else nn.Parameter(torch.empty(length, slots).uniform_(-(slots**-0.5), slots**-0.5))

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        if call.tokens > self.length:
            raise ValueError(f"linformer takes at most length={self.length} tokens, but {call.tokens} came: it has no weights for more")
        return softmax_attention(r.q, self._slots(r.k, self.proj_k), self._slots(r.v, self.proj_k if self.proj_v is None else self.proj_v))

    def _slots(self, t: Tensor, weight: Tensor) -> Tensor:
        """Mix t [B, T, H, K], whose padding is 0, into [B, slots, H, K]."""
        return torch.einsum("bthk,ts->bshk", t, weight[: t.shape[1]].to(t.dtype))
