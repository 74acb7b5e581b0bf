"""Mobile Attention (ICML 2024): many narrow heads that compete for the flow through a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import NOTHING
from linattn.mixers.parts import head_size, to_float32
from linattn.mixers.registry import register

_EPSILON = 1e-6


@register(
    "mobile",
    title="Mobile Attention",
    paper="Mobile Attention: Mobile-Friendly Linear-Attention for Vision Transformers",
    year=2024,
    seeds=("001",),
    equation=r"o_t = \sigma(\hat I_t)\, \frac{\phi(q_t)}{I_t} \sum_i \phi(k_i)^\top n\, \mathrm{softmax}(\hat O)_i\, v_i,\quad"
    r" \phi = \sigma,\quad I^h_t = \phi(q^h_t) \sum_{h'} \phi(k^{h'}_t)^\top",
    causal=False,
    symmetry="permutation",
    oracle="the authors' equations as a loop in float64, and figures of the authors' code",
)
class Mobile(Mixer):
    """A head's query and key of one token are a sink and a source of flow between heads, each of which may have few channels.

    With sums over heads h, not tokens, I = φ(q) Σ_h φ(k) flows into a query and O = φ(k) Σ_h φ(q) out of a key. The flows after
    normalising both to 1, Î = φ(q) Σ_h φ(k) / O and Ô = φ(k) Σ_h φ(q) / I, give the output gate of a head, σ(Î), and by a softmax over
    the tokens the weight of a value. The output grows with the number of tokens, as that of the authors' code, whose names the
    parameters have.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple. Cost grows with dim² / heads.
    """

    packs = False

    def __init__(self, dim: int, heads: int = 16) -> None:
        super().__init__(dim)
        head_size("dim", dim, heads)
        self.heads = heads
        self.query_projection, self.key_projection, self.value_projection, self.out_projection = (nn.Linear(dim, dim) for _ in range(4))

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.query_projection, self.key_projection, self.value_projection))
        q, k = to_float32(q).sigmoid(), to_float32(k).sigmoid()
        into, out_of = 1 / _flow(q, k), 1 / _flow(k, q)  # [B, T, H, 1]
        kept, offered = _flow(q, k * out_of), _flow(k, q * into).clamp(-1, 1)
        return Recurrence(q * into * kept.sigmoid(), k * _competition(offered, call), v, scale=1.0)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.out_projection(o.flatten(-2))


def _flow(a: Tensor, b: Tensor) -> Tensor:
    """Flow from each head of ``a`` [B, T, H, K] to all heads of ``b`` together: [B, T, H, 1]."""
    return ((a + _EPSILON) * (b.sum(2, keepdim=True) + _EPSILON)).sum(-1, keepdim=True)


def _competition(offered: Tensor, call: CallContext) -> Tensor:
    """Softmax over the real tokens of [B, T, H, 1], times their number."""
    if call.lengths is None or call.valid is None:
        return offered.softmax(1) * offered.shape[1]
    real = call.valid[..., None, None]
    share = torch.where(real, offered, NOTHING).softmax(1)
    return torch.where(real, share, 0.0) * call.lengths[:, None, None, None]  # of a row without tokens nothing
