"""Random feature attention (arXiv 2103.02143): sines and cosines of random projections, and a decay gate."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
from linattn.mixers.parts import positive, to_float32
from linattn.mixers.registry import register
from linattn.ops.features import waves

_SCALE = 0.1  # of the features, in the authors' code in place of 1 / √D


@register(
    "rfa",
    title="Random Feature Attention",
    paper="Random Feature Attention",
    arxiv="2103.02143",
    year=2021,
    seeds=("001",),
    equation=r"o_t = \frac{\phi(q_t) S_t}{\max(\phi(q_t) z_t^\top, \varepsilon)},"
    r"\quad \phi(x) = c\,[\sin(W \hat x), \cos(W \hat x)],\quad W = \sigma \odot \tilde W / \tau,\quad \hat x = x / \lVert x \rVert",
    symmetry="permutation",
    oracle="the quadratic formula in float64 by cosines of differences; fla-core 0.6.0, naive_recurrent_linear_attn",
    chinese={"the quadratic formula in float64 by cosines of differences": "float64 下用差的余弦写成的平方形式公式"},
)
class RFA(KernelAttention):
    r"""φ(q)·φ(k) = c² Σ cos(w (q̂ - k̂)), on average c² D exp(-‖σ ⊙ (q̂ - k̂)‖² / 2τ²): softmax up to a constant, as q̂ and k̂ have unit
    length.

    Checked in the authors' code: D = ``random_features`` = 64, W̃ Gaussian and separate for each head, σ learned [H, 1, d], lengths with
    1e-3 added, c = 0.1, biases on all maps, Glorot weights of gain 1/√2, and the denominator at least ``floor`` = 1, since a sum of
    cosines may be zero or negative. They draw W̃ from a pool at every training step; here :meth:`redraw` does so.
    """

    normalize = "return"
    keep_float32 = ("projection",)
    projection: Tensor

    def __init__(
        self, dim: int, heads: int = 4, *, random_features: int = 64, tau: float = 1.0, floor: float = 1.0, causal: bool = True
    ) -> None:
        super().__init__(dim, heads, causal, bias=True)
        positive(random_features=random_features, tau=tau, floor=floor)
        self.tau, self.floor = tau, floor
        self.sigma = nn.Parameter(torch.ones(heads, 1, self.feature_dim))
        self.register_buffer("projection", torch.randn(heads, random_features, self.feature_dim))
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.xavier_uniform_(linear.weight, gain=0.5**0.5)
        nn.init.zeros_(self.o_proj.bias)

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features, from ``generator`` (of the CPU) if given. States made with the old ones do not fit the new."""
        self.projection.copy_(torch.randn(self.projection.shape, generator=generator))

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        w = to_float32(self.sigma).to(q.dtype) * self.projection.to(q.dtype) / self.tau  # [H, D, d]
        q, k = (t / (t.norm(dim=-1, keepdim=True) + 1e-3) for t in (q, k))
        q, k = (_SCALE * waves(torch.einsum("bthd,hfd->bthf", t, w)) for t in (q, k))
        return q, k

    def guard(self, denominator: Tensor) -> Tensor:
        return denominator.clamp_min(self.floor)


@register(
    "gated_rfa",
    title="Gated Random Feature Attention",
    paper="Random Feature Attention",
    arxiv="2103.02143",
    year=2021,
    seeds=("001", "004"),
    equation=r"S_t = g_t S_{t-1} + (1 - g_t)\, \phi(k_t)^\top v_t,\quad z_t = g_t z_{t-1} + (1 - g_t)\, \phi(k_t),\quad"
    r" g_t = \sigma(x_t w + b),\quad o_t = \frac{\phi(q_t) S_t}{\max(\phi(q_t) z_t^\top, \varepsilon)}",
    symmetry="permutation",
    oracle="fla-core 0.6.0, naive_recurrent_simple_gla; the recurrence token by token in float64",
    chinese={"the recurrence token by token in float64": "float64 下逐 token 递推"},
)
class GatedRFA(RFA):
    """A gate for each head and token. z is then an average, at most c² D = 0.64 times the queries', so ``floor`` is 1e-3."""

    def __init__(self, dim: int, heads: int = 4, *, random_features: int = 64, tau: float = 1.0, floor: float = 1e-3) -> None:
        super().__init__(dim, heads, random_features=random_features, tau=tau, floor=floor)
        self.gate_proj = nn.Linear(dim, heads)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r, gate = super().project(x, call), to_float32(self.gate_proj(x))
        return replace(r, k=r.k * (-gate).sigmoid()[..., None], decay=F.logsigmoid(gate))
