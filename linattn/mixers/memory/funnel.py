"""Funnel-Transformer (arXiv 2006.03236): a layer that halves the length: its queries are means of pairs of tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.context import CallContext
from linattn.mixers.kinds import Resampler
from linattn.mixers.memory.attention import check_least, means, softmax_attention
from linattn.mixers.parts import head_size, to_float32
from linattn.mixers.registry import register


@register(
    "funnel",
    title="Funnel-Transformer, the layer that pools",
    paper="Funnel-Transformer: Filtering out Sequential Redundancy for Efficient Language Processing",
    arxiv="2006.03236",
    year=2020,
    seeds=("001",),
    kind="resample",
    causal=False,
    growth="n^2",
    linear_in_values=False,  # a norm follows the sum of pooled tokens and values
    equation=r"y = \mathrm{LN}\big(x' + \mathrm{Attention}(Q = x', KV = x)\big),\quad x'_i = \tfrac12 (x_{2i-1} + x_{2i}),\ x'_0 = x_0,"
    r"\quad s_{ij} = \big((q_i + u) k_j^\top + (q_i + w) (W_R R_{i-j})^\top\big) / \sqrt{d}",
    oracle="transformers, FunnelRelMultiheadAttention with pooled queries",
    families=("down-sampling",),
    chinese={
        "Funnel-Transformer, the layer that pools": "Funnel-Transformer 的池化层",
        "FunnelRelMultiheadAttention with pooled queries": "查询经池化的 FunnelRelMultiheadAttention",
    },
)
class Funnel(Resampler):
    """n tokens become ⌈n / 2⌉: only queries are pooled (section 2.2), keys and values are those of all tokens.

    With ``separate_cls`` the first token is not part of a pair and has no position, and the last token is not pooled, so that lengths
    stay powers of 2; attention still reads it. Positions are sinusoids of distances in the factorised form of appendix A.2.2, exact
    and without a matrix of them; ``spacing`` is how far apart the tokens come in, 2^b behind b layers that pool. Residual and norm
    are inside, as in the paper, since only this layer has the pooled tokens. The way back to n tokens is :func:`upsampled`.
    """

    def __init__(self, dim: int, heads: int = 4, *, separate_cls: bool = True, spacing: int = 1) -> None:
        super().__init__(dim)
        self.heads, self.size, self.separate_cls, self.spacing = heads, head_size("dim", dim, heads), separate_cls, spacing
        check_least(1, spacing=spacing)
        if dim % 2:
            raise ValueError(f"dim must be even, for sines and cosines, but came as {dim}")
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=bias) for bias in (False, True, True, True))
        self.r_proj = nn.Linear(dim, dim, bias=False)
        self.content_bias, self.position_bias = (nn.Parameter(0.02 * torch.randn(heads, self.size)) for _ in range(2))  # u, w
        self.norm = nn.LayerNorm(dim, eps=1e-9)

    def resampled(self, lengths: Any) -> Any:
        return (lengths + 1) // 2

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        pooled = means(torch.cat([x[:, :1], x[:, :-1]], 1) if self.separate_cls else x, 2, call.counts)
        q, k, v = (p(t).unflatten(-1, (self.heads, -1)) for p, t in ((self.q_proj, pooled), (self.k_proj, x), (self.v_proj, x)))
        near, keys = self._positions(q, x.shape[1])
        q, k = torch.cat([q + self.content_bias, near], -1), torch.cat([k, keys.expand(*k.shape[:3], -1)], -1)  # [B, .., H, K + D]
        o = softmax_attention(q.to(v.dtype), k.to(v.dtype), v, call.valid, scale=self.size**-0.5)
        return self.norm(pooled + self.o_proj(o.flatten(-2)))

    def _positions(self, q: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Extra channels for queries [B, T', H, D] and keys [T, 1, D] whose product is (q + w) (W_R R)ᵀ.

        sin(i - j) and cos(i - j) factor into products of terms in i and in j.
        """
        i, j = (self._angles(n, step, q) for n, step in ((q.shape[1], 2), (tokens, 1)))
        weight = to_float32(self.r_proj.weight).unflatten(0, (self.heads, -1))
        a, b = torch.einsum("bthk,hkd->bthd", to_float32(q + self.position_bias), weight).chunk(2, -1)  # of sin(i - j), of cos(i - j)
        near = torch.cat([a * i.sin() + b * i.cos(), b * i.sin() - a * i.cos()], -1)
        keys = torch.cat([j.cos(), j.sin()], -1)
        if self.separate_cls:
            near, keys = near * _not_first(near.shape[1], near), keys * _not_first(tokens, near)
        return near, keys

    def _angles(self, count: int, step: int, like: Tensor) -> Tensor:
        """Angles [count, 1, D / 2]: positions of tokens, or of the first, second, fourth ... of them, times the frequencies."""
        dim, dtype = self.r_proj.in_features, to_float32(like.new_empty(0)).dtype
        place = step * torch.arange(count, device=like.device, dtype=dtype)
        if step == 2 and self.separate_cls:
            place = place - 1
        frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=like.device, dtype=dtype) / dim)
        return (self.spacing * place)[:, None, None] * frequency


def upsampled(y: Tensor, length: int, *, stride: int = 2, separate_cls: bool = True) -> Tensor:
    """Upsample y [B, T', D] to ``length`` tokens, each repeated ``stride`` times, a separate first one once (section 2.3).

    Dropped tokens are 0. The paper's decoder adds the output of the first block for all tokens.
    """
    first, rest = (y[:, :1], y[:, 1:]) if separate_cls else (y[:, :0], y)
    rest = rest.repeat_interleave(stride, 1)[:, : length - first.shape[1]]
    return torch.cat([first, F.pad(rest, (0, 0, 0, length - first.shape[1] - rest.shape[1]))], 1)


def _not_first(count: int, like: Tensor) -> Tensor:
    """Mask [count, 1, 1], 0 for the first and 1 for the others."""
    return (torch.arange(count, device=like.device) > 0).to(like.dtype)[:, None, None]
