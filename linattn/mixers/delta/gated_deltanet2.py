"""Gated DeltaNet-2 (arXiv 2605.22791): the delta rule with separate gates per channel for erasing and for writing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.delta.kda import KDA
from linattn.mixers.parts import to_float32, unit
from linattn.mixers.registry import register


@register(
    "gated_deltanet2",
    title="Gated DeltaNet-2",
    paper="Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention",
    arxiv="2605.22791",
    year=2026,
    equation=r"S_t = (I - k_t^\top (b_t \odot k_t))\,\mathrm{Diag}(\alpha_t) S_{t-1} + k_t^\top (w_t \odot v_t),\quad"
    r" b_t = \sigma(x_t W_b),\quad w_t = \sigma(x_t W_w),\quad \alpha_t = \exp(-e^{A}\,\mathrm{softplus}(x_t W_1 W_2 + c)),\quad"
    r" o_t = q_t S_t",
    oracle="fla-core 0.6.0, naive_recurrent_gdn2; the recurrence token by token in float64",
    chinese={"the recurrence token by token in float64": "float64 下逐 token 递推"},
)
class GatedDeltaNet2(KDA):
    """KDA with two gates in place of β: b [B, T, H, K] on the key that reads for erasure, w [B, T, H, V] on the written value.

    Otherwise as KDA, with a bias in the output gate; b = w = β gives KDA. ``negative_eigenvalues`` lets b reach 2, here at most
    2 / ‖k‖², since rounding may leave k longer than 1.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, size: int | None = None, conv_width: int = 4, eps: float = 1e-5,
        negative_eigenvalues: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, size=size, conv_width=conv_width, eps=eps, negative_eigenvalues=negative_eigenvalues, gate_bias=True)
        self.b_proj, self.w_proj = (nn.Linear(dim, heads * self.size, bias=False) for _ in range(2))

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.conv(self.qkv_proj(x), call).unflatten(-1, (3, self.heads, self.size)).unbind(2)
        k = to_float32(unit(k, dtype=v.dtype))  # rounded as in the recurrence, so that erasures match writes
        decay, b, w = (to_float32(p(x).unflatten(-1, (self.heads, -1))) for p in (self.decay_proj, self.b_proj, self.w_proj))
        decay = -self.A_log.exp()[:, None] * F.softplus(decay + self.dt_bias)
        b = torch.minimum(self.largest_beta * b.sigmoid(), 2 / k.square().sum(-1, keepdim=True).clamp(min=1))
        return Recurrence(unit(q), k, w.sigmoid() * to_float32(v), decay=decay, erase=(decay.exp() * b * k, -k))
