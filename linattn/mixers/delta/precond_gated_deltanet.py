"""Preconditioned Gated DeltaNet (arXiv 2604.21100): the delta rule with writes scaled by an inverse diagonal curvature of the keys."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.delta.gated_deltanet import GatedDeltaNet
from linattn.mixers.parts import time_steps, to_float32
from linattn.mixers.registry import register
from linattn.ops import diagonal_scan

EPS = 1e-6  # added to the curvature before its logarithm
CURVATURE = (
    r"\quad a_t = \gamma_t a_{t-1} + \eta_t\, k_t \odot k_t,"
    r"\quad p_t = k_t \odot s^{-r_t / (1 + |r_t|)},\quad r_t = \log(a_t + \varepsilon) - c"
)


class Preconditioned(Mixer):
    """Base of delta rules whose keys write after a preconditioner: the inverse of a diagonal curvature, limited to a range.

    The curvature a [rows, H K] is a sum of squared keys with decay γ and weight η per head and token. The key's channels are
    multiplied by ``squash`` ** -(r / (1 + |r|)), between 1 / squash and squash, where r is log a less a learned number per head.
    β is at most 2 / (k · p), since beyond it every repeated token grows the state. Only with ``negative_eigenvalues``
    is this bound reached; fla has none.
    """

    squash: float

    def add_preconditioner(self, dim: int, heads: int, squash: float) -> None:
        """Make the parameters of γ, η and c."""
        if not 1 <= squash <= 2:
            raise ValueError(f"squash must be at least 1 and at most 2, but came as {squash}")
        self.squash = squash
        self.curvature_a_proj, self.curvature_b_proj = (nn.Linear(dim, heads, bias=False) for _ in range(2))
        self.curvature_A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32).uniform_(1, 16).log())
        self.curvature_dt_bias = nn.Parameter(time_steps(heads))
        self.curvature_center = nn.Parameter(torch.full((heads,), -0.2, dtype=torch.float32))

    def preconditioned(self, r: Recurrence, x: Tensor, call: CallContext) -> Recurrence:
        """Add the preconditioner to the delta rule ``r`` of the tokens ``x``; keeps the curvature after the last token."""
        assert r.decay is not None
        assert r.beta is not None
        k = to_float32(r.k)
        curvature = self._curvature(k, x, call)
        distance = (curvature + EPS).log() - self.curvature_center[:, None]
        written = k * (-math.log(self.squash) * distance / (1 + distance.abs())).exp()
        group = r.v.shape[2] // k.shape[2]
        k, spread = k.repeat_interleave(group, 2), written.repeat_interleave(group, 2)
        beta = torch.minimum(r.beta, 2 / (k * spread).sum(-1).clamp(min=1))[..., None]
        fade = r.decay.exp() if r.decay.ndim == 4 else r.decay.exp()[..., None]
        return Recurrence(r.q, written, beta * to_float32(r.v), decay=r.decay, erase=(fade * k, -beta * spread))

    def _curvature(self, k: Tensor, x: Tensor, call: CallContext) -> Tensor:
        """The curvature after each token, [B, T, H, K]."""
        decay = -self.curvature_A_log.exp() * F.softplus(to_float32(self.curvature_a_proj(x)) + self.curvature_dt_bias)
        decay = decay[..., None].expand_as(k).flatten(-2)
        new = (to_float32(self.curvature_b_proj(x)).sigmoid()[..., None] * k.square()).flatten(-2)
        if call.valid is not None:
            valid = call.valid[..., None]
            decay, new = torch.where(valid, decay, 0.0), torch.where(valid, new, 0.0)
        a, last = diagonal_scan(decay, new, initial_state=call.get("curvature"), return_state=True, cu_seqlens=call.cu_seqlens)
        call.keep("curvature", last)
        return a.clamp(min=0).view_as(k)


@register(
    "precond_gated_deltanet",
    title="Preconditioned Gated DeltaNet",
    paper="Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear Recurrences",
    arxiv="2604.21100",
    year=2026,
    equation=r"S_t = (I - \beta_t p_t^\top k_t)\,\alpha_t S_{t-1} + \beta_t p_t^\top v_t,\quad o_t = q_t S_t," + CURVATURE,
    oracle="fla-core 0.6.0, naive_recurrent_precond_gated_delta_rule; the recurrence token by token in float64",
    chinese={
        "Preconditioned Gated DeltaNet": "预条件 Gated DeltaNet",
        "the recurrence token by token in float64": "float64 下逐 token 递推",
    },
)
class PrecondGatedDeltaNet(Preconditioned, GatedDeltaNet):
    """Gated DeltaNet with a preconditioner: see :class:`Preconditioned`. Value heads of a key head share it."""

    keep_float32 = (*GatedDeltaNet.keep_float32, "curvature_A_log", "curvature_dt_bias", "curvature_center")  # type: ignore[assignment]  # longer than the base class's

    def __init__(
        self, dim: int, heads: int = 4, *, value_heads: int | None = None, key_size: int | None = None, value_size: int | None = None,
        conv_width: int = 4, negative_eigenvalues: bool = False, squash: float = 1.5, eps: float = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, heads, value_heads=value_heads, key_size=key_size, value_size=value_size, conv_width=conv_width,
            negative_eigenvalues=negative_eigenvalues, eps=eps,
        )  # fmt: skip
        self.add_preconditioner(dim, heads, squash)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return self.preconditioned(super().project(x, call), x, call)
