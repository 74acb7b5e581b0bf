"""Log-linear attention (arXiv 2506.04761): the past is split into buckets of doubling length, each with its own weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.decay.mamba2 import Mamba2
from linattn.mixers.delta.gated_deltanet import GatedDeltaNet
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register
from linattn.ops import linear_attention


@dataclass(frozen=True, kw_only=True)
class Levels(Recurrence):
    """``weights`` λ [B, T, H, levels]: how much the output takes from each bucket; the first is the token itself."""

    weights: Tensor


class LogLinear(Mixer):
    """A recurrence of decays per head, with or without the delta rule, read bucket by bucket.

    Token s lies in bucket ℓ of token t where the highest bit in which their positions differ is the ℓ-th (a Fenwick tree).
    So at level ℓ time is split into blocks of 2^ℓ: tokens of the first half write, those of the second half read, all decay and
    erase, and the next block starts from an empty state. Each level is one recurrence with resets; all levels are heads of one
    call. The state holds ``levels`` - 1 matrices a head, enough for 2^(levels - 1) tokens (16384 by default, as the authors');
    from there on tokens of earlier blocks of that length are out of reach. λ is the softplus of a map of the token times a
    scale per head and level, as in the authors' layers.
    """

    shards = True

    levels: int
    level_proj: nn.Linear
    level_scale: nn.Parameter

    def add_levels(self, dim: int, heads: int, levels: int) -> None:
        """Make the parameters of λ."""
        if levels < 2:
            raise ValueError(f"levels must be at least 2, but came as {levels}")
        self.levels = levels
        self.level_proj = nn.Linear(dim, heads * levels, bias=False)
        self.level_scale = nn.Parameter(torch.ones(heads, levels))

    def weighed(self, r: Recurrence, x: Tensor) -> Levels:
        """Add λ of the tokens ``x`` to the recurrence ``r``."""
        weights = F.softplus(to_float32(self.level_scale) * to_float32(self.level_proj(x).unflatten(-1, (len(self.level_scale), -1))))
        return Levels(r.q, r.k, r.v, decay=r.decay, beta=r.beta, scale=r.scale, skip=r.skip, weights=weights)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert isinstance(r, Levels)
        assert r.decay is not None
        o = self._own(r)
        levels = self.levels - 1
        if call.fresh and not call.returning:
            levels = min(levels, max(call.tokens - 1, 0).bit_length())  # no more levels than the tokens need
        if levels == 0:
            return o.to(r.v.dtype)
        level = torch.arange(levels, device=r.v.device)
        place = call.positions[..., None]  # [B, T, 1]
        second = (place >> level) % 2 == 1  # [B, T, levels]: in the second half of the block
        first = place % (2 << level) == 0  # the block begins
        if call.valid is not None:
            first = first & call.valid[..., None]
        v = torch.where(second[..., None, None], 0.0, r.v[:, :, None])  # [B, T, levels, H, V]
        decay = torch.where(first[..., None], -torch.inf, r.decay[:, :, None])  # [B, T, levels, H]
        q, k = (t[:, :, None].expand(-1, -1, levels, -1, -1).flatten(2, 3) for t in (r.q, r.k))
        beta = None if r.beta is None else r.beta[:, :, None].expand(-1, -1, levels, -1).flatten(2)
        out = linear_attention(
            q, k, v.flatten(2, 3), decay=decay.flatten(2), beta=beta, scale=r.scale, initial_state=call.get("S"),
            return_state=call.returning, cu_seqlens=call.cu_seqlens, form=self.form,
        )  # fmt: skip
        if call.returning:
            out, state = out
            call.keep("S", state)
        weights = torch.where(second[..., None, :], r.weights[..., 1 : levels + 1], 0.0)  # [B, T, H, levels]
        return (o + torch.einsum("bthl,btlhp->bthp", weights, to_float32(out).unflatten(2, (levels, -1)))).to(r.v.dtype)

    def _own(self, r: Levels) -> Tensor:
        """Output of each token from itself, [B, T, H, V], the bucket below all levels."""
        met = (to_float32(r.q) * to_float32(r.k)).sum(-1).repeat_interleave(r.v.shape[2] // r.q.shape[2], 2)  # [B, T, H]
        met = met * (r.q.shape[-1] ** -0.5 if r.scale is None else r.scale)
        return (met * r.weights[..., 0] * (1.0 if r.beta is None else r.beta))[..., None] * r.v

    def attend_flops(self, r: Recurrence, past: int) -> int:
        return super().attend_flops(r, past) * (self.levels - 1)


@register(
    "log_linear",
    title="Log-linear attention (Mamba-2)",
    paper="Log-Linear Attention",
    arxiv="2506.04761",
    year=2025,
    equation=r"o_t = \sum_{\ell} \lambda_t^{(\ell)} q_t S_t^{(\ell)} + D v_t,\quad"
    r" S_t^{(\ell)} = \sum_{s:\ \mathrm{bits}(t \oplus s) = \ell} \Big(\prod_{s < r \le t} \alpha_r\Big) k_s^\top v_s",
    growth="n log n",
    oracle="fla-core 0.6.0, naive_log_linear_attn",
    chinese={"Log-linear attention (Mamba-2)": "对数线性注意力（Mamba-2）"},
)
class LogLinearMamba2(LogLinear, Mamba2):
    """Mamba-2, log-linear: see :class:`LogLinear`."""

    def __init__(
        self, dim: int, *, levels: int = 15, expand: int = 2, head_dim: int = 64, state_size: int = 128, groups: int = 1,
        conv_width: int = 4,
    ) -> None:  # fmt: skip
        super().__init__(dim, expand=expand, head_dim=head_dim, state_size=state_size, groups=groups, conv_width=conv_width)
        self.add_levels(dim, self.heads, levels)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return self.weighed(super().project(x, call), x)


@register(
    "log_linear_gdn",
    title="Log-linear attention (Gated DeltaNet)",
    paper="Log-Linear Attention",
    arxiv="2506.04761",
    year=2025,
    equation=r"o_t = \sum_{\ell} \lambda_t^{(\ell)} q_t S_t^{(\ell)},\quad S_t^{(\ell)} = \sum_{s:\ \mathrm{bits}(t \oplus s) = \ell}"
    r" \Big(\prod_{r=t}^{s+1} \alpha_r (I - \beta_r k_r^\top k_r)\Big) \beta_s k_s^\top v_s",
    growth="n log n",
    oracle="the products of the equation in float64, pair by pair, and fla-core 0.6.0, naive_recurrent_gated_delta_rule, with λ = 1",
    chinese={
        "Log-linear attention (Gated DeltaNet)": "对数线性注意力（Gated DeltaNet）",
        "the products of the equation in float64": "float64 下按公式求积",
        "pair by pair": "逐对计算",
        "and fla-core {}": "以及 fla-core {}",
        "with λ = {}": "λ 取 {}",
    },
)
class LogLinearGatedDeltaNet(LogLinear, GatedDeltaNet):
    """Gated DeltaNet, log-linear: see :class:`LogLinear`. Decay and erasure act on every bucket; a token writes to its own."""

    def __init__(
        self, dim: int, heads: int = 4, *, levels: int = 15, value_heads: int | None = None, key_size: int | None = None,
        value_size: int | None = None, conv_width: int = 4,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, value_heads=value_heads, key_size=key_size, value_size=value_size, conv_width=conv_width)
        self.add_levels(dim, self.value_heads, levels)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return self.weighed(super().project(x, call), x)
