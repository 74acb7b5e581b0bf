"""Gated slot attention (arXiv 2409.07146): a fixed number of slots for keys and values, each with a decay of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, at_least, head_size, positive, to_float32
from linattn.mixers.registry import register
from linattn.ops import linear_attention
from linattn.ops.outer_decay import outer_decay


@dataclass(frozen=True, kw_only=True)
class Slots(Recurrence):
    """M slots in place of key channels: their decay ``fade`` [B, T, H, M], a natural logarithm of at most 0, and the weight
    ``write`` [B, T, H, M] of a token in each slot.
    """

    fade: Tensor
    write: Tensor

    def masked(self, valid: Tensor | None) -> Recurrence:
        if valid is None:
            return self
        return Recurrence.masked(replace(self, fade=torch.where(valid[..., None, None], self.fade, 0.0)), valid)


class SlotMemory(Mixer):
    """Base of softmax attention to M slots, which hold weighted sums of the keys and of the values so far.

    Two recurrences with one decay per slot: q_t reads the keys' slots, [K, M], whose columns fade, and the softmax of those M scores
    reads the values' slots, [M, V], whose rows fade. State: ``keys`` [rows, H, K, M] and ``values`` [rows, H, M, V]. The scores
    are float32 (float64 for float64) whatever the dtype of the tokens.
    """

    shards = True

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, Slots)
        k, write = to_float32(r.k), to_float32(r.write)
        scores, keys = outer_decay(
            to_float32(r.q), k, write, torch.zeros_like(k), r.fade, scale=r.scale, initial_state=call.get("keys"), return_state=True,
            cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        call.keep("keys", keys)
        o, values = linear_attention(
            scores.softmax(-1).to(r.v.dtype), write.to(r.v.dtype), r.v, decay=r.fade, scale=1.0, initial_state=call.get("values"),
            return_state=True, cu_seqlens=call.cu_seqlens, form=self.form,
        )  # fmt: skip
        call.keep("values", values)
        return o

    def attend_flops(self, r: Recurrence, past: int) -> int:
        assert isinstance(r, Slots)
        return r.write.numel() * 5 * (r.k.shape[3] + r.v.shape[3])  # each entry of both states: 1 to fade, 2 to write, 2 to read


@register(
    "gsa",
    title="Gated slot attention",
    paper="Gated Slot Attention for Efficient Linear-Time Sequence Modeling",
    arxiv="2409.07146",
    year=2024,
    equation=r"\tilde K_t = \mathrm{Diag}(\alpha_t) \tilde K_{t-1} + (1 - \alpha_t)^\top k_t,\quad"
    r" \tilde V_t = \mathrm{Diag}(\alpha_t) \tilde V_{t-1} + (1 - \alpha_t)^\top v_t,\quad"
    r" \alpha_t = \sigma(x_t W)^{1/\tau},\quad o_t = \mathrm{softmax}(q_t \tilde K_t^\top) \tilde V_t",
    oracle="fla-core 0.6.0, naive_recurrent_gsa; the recurrence token by token in float64",
    chinese={"Gated slot attention": "门控槽注意力", "the recurrence token by token in float64": "float64 下逐 token 递推"},
)
class GSA(SlotMemory):
    """Swish on q, k and v, queries that are not scaled; swish and one RMS norm over all heads on the output.

    As in the authors' layer in fla, which also has several query heads per key head. ``slots`` is the paper's 64; the weight of a
    token in a slot is 1 minus the slot's decay factor.
    """

    def __init__(self, dim: int, heads: int = 4, *, slots: int = 64, tau: float = 8.0, eps: float = 1e-5) -> None:
        super().__init__(dim)
        head_size("dim", dim, heads)
        at_least(1, slots=slots)
        positive(tau=tau)
        self.heads, self.tau = heads, tau
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.f_proj = nn.Linear(dim, heads * slots, bias=False)
        self.norm = HeadNorm(dim, eps=eps)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (F.silu(p(x)).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        fade = F.logsigmoid(to_float32(self.f_proj(x)).unflatten(-1, (self.heads, -1))) / self.tau
        return Slots(q, k, v, fade=fade, write=-torch.expm1(fade), scale=1.0)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(F.silu(o).flatten(-2)))
