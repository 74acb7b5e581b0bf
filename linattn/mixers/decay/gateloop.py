"""GateLoop (arXiv 2311.01927): each channel of the state decays and rotates, both depending on the token."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext, State
from linattn.mixers.parts import HeadNorm, head_size, to_float32
from linattn.mixers.registry import register
from linattn.ops import diagonal_scan


@register(
    "gateloop",
    title="GateLoop",
    paper="GateLoop: Fully Data-Controlled Linear Recurrence for Sequence Modeling",
    arxiv="2311.01927",
    year=2023,
    seeds=("004",),
    equation=r"S_t = \mathrm{Diag}(\alpha_t) S_{t-1} + k_t^\top v_t,\quad \alpha_t = \sigma(x_t W_\gamma) e^{\mathrm{i} x_t W_\theta},\quad"
    r" o_t = \mathrm{Re}(q_t S_t)",
    oracle="the paper's recurrence in complex numbers, token by token in float64",
    chinese={"the paper's recurrence in complex numbers": "论文的复数递推"},
)
class GateLoop(Mixer):
    """The complex decay in real numbers: queries and keys are rotated by the cumulative phase, K doubles, and the decay is the magnitude of
    α. The phase is part of the state, in float64 and modulo 2π, so that it is exact at any length.

    RMS norm over all heads and a swish gate; in the paper every channel is a head (``heads=dim``).
    Checked against two public reimplementations (jonmorton/gateloop_jax, MasahideOkada/gateloop-lm), since the author's repository
    no longer has this model: both gate with SiLU, the first has σ for the magnitude and the identity for the angle, as the paper has.
    They differ in the kind of norm; RMS norm is a choice made here.
    """

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__(dim)
        head_size("dim", dim, heads)
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.decay_proj, self.angle_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm = HeadNorm(dim)

    def project(self, x: Tensor, call: CallContext) -> tuple[Recurrence, State]:
        phase, last = self._phase(to_float32(self.angle_proj(x)), call)
        turn = torch.stack([phase.cos(), phase.sin()], -2).to(to_float32(x).dtype)  # [B, T, 2, D]
        q, k = (_heads(p(x)[..., None, :] * turn, self.heads) for p in (self.q_proj, self.k_proj))
        decay = F.logsigmoid(to_float32(self.decay_proj(x)))[..., None, :].expand_as(turn)
        v = self.v_proj(x).unflatten(-1, (self.heads, -1))
        return Recurrence(q, k, v, decay=_heads(decay, self.heads), scale=1.0), {"phase": last}

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o.flatten(-2), self.g_proj(x)))

    def _phase(self, angles: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        """Sum of ``angles`` [B, T, D] up to each token, and over all tokens [rows, D] modulo whole turns."""
        exact = torch.float32 if angles.device.type == "mps" else torch.float64  # MPS has no float64
        angles = angles.to(exact)
        if call.valid is not None:
            angles = torch.where(call.valid[..., None], angles, 0.0)
        unfading = angles.new_zeros(angles.shape[-1])
        phase, last = diagonal_scan(unfading, angles, initial_state=call.get("phase"), return_state=True, cu_seqlens=call.cu_seqlens)
        return phase, last.remainder(2 * math.pi)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, 2, D] -> [B, T, H, 2 K]."""
    return x.unflatten(-1, (heads, -1)).transpose(2, 3).flatten(-2)
