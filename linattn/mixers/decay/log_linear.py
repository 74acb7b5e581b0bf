"""Log-linear attention (arXiv 2506.04761): Mamba-2 whose past lies in buckets of doubling length, each with a weight of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.carry import Carry
from linattn.mixers.decay.mamba2 import Mamba2
from linattn.mixers.parts import wide
from linattn.mixers.registry import register
from linattn.ops import linear_attention


@dataclass(frozen=True, kw_only=True)
class Levels(Recurrence):
    """``weights`` λ [B, T, H, levels]: how much the output takes from each bucket; the first is the token itself."""

    weights: Tensor


@register(
    "log_linear",
    title="Log-linear attention (Mamba-2)",
    paper="Log-Linear Attention",
    arxiv="2506.04761",
    year=2025,
    equation=r"o_t = \sum_{\ell} \lambda_t^{(\ell)} q_t S_t^{(\ell)} + D v_t,\quad"
    r" S_t^{(\ell)} = \sum_{s:\ \mathrm{bits}(t \oplus s) = \ell} \Big(\prod_{s < r \le t} \alpha_r\Big) k_s^\top v_s",
    oracle="fla-core 0.6.0, naive_log_linear_attn",
)
class LogLinearMamba2(Mamba2):
    """Token s lies in bucket ℓ of token t where the highest bit in which their positions differ is the ℓ-th (a Fenwick tree).

    So at level ℓ time falls into blocks of 2^ℓ: tokens of the first half write, those of the second half read, and the next
    block starts from nothing. That is one recurrence with resets for each level, all run as heads of one call. The state holds
    ``levels`` - 1 matrices a head, enough for 2^(levels - 1) tokens (16384 by default, as the authors'); from there on tokens
    of earlier blocks of that length are out of reach. λ is the softplus of a map of the token times a scale per head and level,
    as in the authors' layer in fla.
    """

    def __init__(
        self, dim: int, *, levels: int = 15, expand: int = 2, head_dim: int = 64, state_size: int = 128, groups: int = 1,
        conv_width: int = 4,
    ) -> None:  # fmt: skip
        super().__init__(dim, expand=expand, head_dim=head_dim, state_size=state_size, groups=groups, conv_width=conv_width)
        if levels < 2:
            raise ValueError(f"levels must be at least 2, but came as {levels}")
        self.levels = levels
        self.level_proj = nn.Linear(dim, self.heads * levels, bias=False)
        self.level_scale = nn.Parameter(torch.ones(self.heads, levels))

    def project(self, x: Tensor, state: Carry) -> Recurrence:
        r = super().project(x, state)
        weights = F.softplus(wide(self.level_scale) * wide(self.level_proj(x).unflatten(-1, (self.heads, -1))))
        return Levels(r.q, r.k, r.v, decay=r.decay, scale=r.scale, skip=r.skip, weights=weights)

    def attend(self, r: Recurrence, carry: Carry) -> Tensor:
        assert isinstance(r, Levels)
        assert r.decay is not None
        group = r.v.shape[2] // r.q.shape[2]
        own = (wide(r.q) * wide(r.k)).sum(-1).repeat_interleave(group, 2) * r.weights[..., 0]  # [B, T, H]
        o = own[..., None] * r.v
        levels = self.levels - 1
        if carry.fresh and not carry.returning:
            levels = min(levels, max(carry.tokens - 1, 0).bit_length())  # the tokens reach no further
        if levels == 0:
            return o.to(r.v.dtype)
        level = torch.arange(levels, device=r.v.device)
        place = carry.positions[..., None]  # [B, T, 1]
        second = (place >> level) % 2 == 1  # [B, T, levels]: in the second half of the block
        first = place % (2 << level) == 0  # the block begins
        if carry.valid is not None:
            first = first & carry.valid[..., None]
        k = torch.where(second[..., None, None], 0.0, r.k[:, :, None])  # [B, T, levels, G, N]
        decay = torch.where(first[..., None], -torch.inf, r.decay[:, :, None])  # [B, T, levels, H]
        q, v = (t[:, :, None].expand(-1, -1, levels, -1, -1).flatten(2, 3) for t in (r.q, r.v))
        out = linear_attention(
            q, k.flatten(2, 3), v, decay=decay.flatten(2), scale=r.scale, initial_state=carry.get("S"), return_state=carry.returning,
            cu_seqlens=carry.cu_seqlens, form=self.form,
        )  # fmt: skip
        if carry.returning:
            out, state = out
            carry.keep("S", state)
        weights = torch.where(second[..., None, :], r.weights[..., 1 : levels + 1], 0.0)  # [B, T, H, levels]
        return (o + torch.einsum("bthl,btlhp->bthp", weights, wide(out).unflatten(2, (levels, -1)))).to(r.v.dtype)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        return super().attend_flops(r, past) * (self.levels - 1)
