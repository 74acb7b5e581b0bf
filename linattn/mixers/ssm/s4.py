"""S4 (arXiv 2111.00396): a learned state space initialised by HiPPO, normal plus low rank."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register
from linattn.mixers.ssm.lti import StateSpace, as_complex, complex_parameter, log_steps, pairs, values
from linattn.ops import hippo


@register(
    "s4",
    title="S4 (structured state spaces)",
    paper="Efficiently Modeling Long Sequences with Structured State Spaces",
    arxiv="2111.00396",
    year=2021,
    seeds=("000",),
    equation=r"h_t = \bar{A} h_{t-1} + \bar{B} x_t,\quad \bar{A} = (I - \tfrac{\Delta}{2} A)^{-1} (I + \tfrac{\Delta}{2} A),\quad"
    r" \bar{B} = (I - \tfrac{\Delta}{2} A)^{-1} \Delta B,\quad A = \Lambda - P P^*,\quad o_t = \mathrm{Re}(C h_t) + D x_t",
    growth="n log n",
    oracle="espnet 202511, SSKernelNPLR",
    chinese={"S4 (structured state spaces)": "S4（结构化状态空间）"},
)
class S4(StateSpace):
    """A, P and B start as HiPPO-LegS; bilinear rule; then GELU and a gated linear map (GLU).

    :meth:`kernel` is the paper's algorithm, a Cauchy kernel at the roots of unity, for all of a sequence. The mixer itself
    uses only the kernel of one chunk and powers of the transition (see :func:`linattn.lti`), which takes less memory than
    a Cauchy matrix of [D, K, T] and is exactly causal.

    Read in the authors' models/s4/s4.py: rank 1, conjugate pairs kept once, time steps log-uniform in [1e-3, 0.1], C complex
    normal. There C is a parameter times I − Ā^L for a length L; here it is C itself, good for every length.
    """

    keep_float32 = ("log_dt", "log_A_real", "A_imag", "P", "B", "C")

    def __init__(self, dim: int, *, state_size: int = 64, dt_min: float = 1e-3, dt_max: float = 0.1) -> None:
        super().__init__(dim)
        pairs(state_size)
        self.state_size = state_size
        eigenvalues, p, b, _ = hippo.nplr(state_size)
        self.log_dt = nn.Parameter(log_steps(dim, dt_min, dt_max))
        self.log_A_real = nn.Parameter(torch.log(-eigenvalues.real).float().repeat(dim, 1))  # [D, K / 2]
        self.A_imag = nn.Parameter(eigenvalues.imag.float().repeat(dim, 1))
        self.P, self.B = (nn.Parameter(torch.view_as_real(t).float().repeat(dim, 1, 1)) for t in (p, b))  # [D, K / 2, 2]
        self.C = complex_parameter(dim, pairs(state_size))
        self.D = nn.Parameter(torch.randn(dim))
        self.o_proj = nn.Linear(dim, 2 * dim)

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        """Discrete system in real numbers, since P P* mixes a number and its conjugate: real parts, then imaginary ones.

        There A is a rotation of each pair minus 2 p pᵀ, so (2/Δ − A)⁻¹ is its reciprocals corrected once (Sherman-Morrison),
        Ā = 4/Δ (2/Δ − A)⁻¹ − I and B̄ = 2 (2/Δ − A)⁻¹ B.
        """
        rate = 2 * torch.exp(-self.log_dt)[:, None]
        p = as_complex(self.P)
        d = 1 / (rate - self._eigenvalues())
        right, left = _real(d * p), _real(d.conj() * p)
        gain = 2 / (1 + 2 * (d.real * (p * p.conj()).real).sum(-1))
        inverse = _rotations(d) - gain[:, None, None] * right[:, :, None] * left[:, None]  # (2/Δ − A)⁻¹ [D, K, K]
        a = 2 * rate[..., None] * inverse - torch.eye(self.state_size, dtype=inverse.dtype, device=inverse.device)
        b = 2 * (inverse @ _real(as_complex(self.B))[..., None])[..., 0]
        return a, b, 2 * _real(as_complex(self.C).conj())

    def kernel(self, tokens: int) -> Tensor:
        """Impulse response [T, D] by its generating function at the T roots of unity, and an inverse Fourier transform.

        Σ_l K_l ω^l over l < T is C (I − Ā^T) [2/Δ (1 − ω) − (1 + ω) A]⁻¹ 2 B. The factor 1 + ω keeps it finite at
        ω = −1; the matrix to invert is diagonal plus rank 1.
        """
        if tokens == 0:
            return self.log_dt.new_zeros(0, self.log_dt.shape[0])
        a, _, c = self.system()
        read = c - (c[:, None] @ torch.linalg.matrix_power(a, tokens))[:, 0]  # C (I − Ā^T)
        x, y = read.chunk(2, -1)
        eigenvalues, p, b, c = self._eigenvalues(), as_complex(self.P), as_complex(self.B), torch.complex(x, -y) / 2
        angles = torch.arange(tokens // 2 + 1, device=a.device, dtype=a.dtype) * (-2 * math.pi / tokens)
        omega = torch.polar(torch.ones_like(angles), angles)
        s, g = 1 + omega, 2 * torch.exp(-self.log_dt)[:, None] * (1 - omega)  # [L], [D, L]
        cb, cp, pb, pp = _cauchy(torch.stack([c * b, c * p, p.conj() * b, p.conj() * p], 1), eigenvalues, g, s).unbind(1)
        return torch.fft.irfft(2 * (cb - s * cp * pb / (1 + s * pp)), tokens).mT

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return values(x, skip=x * self.D)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return F.glu(self.o_proj(F.gelu(o[..., 0])), -1)

    def _eigenvalues(self) -> Tensor:
        return torch.complex(-to_float32(self.log_A_real).exp(), to_float32(self.A_imag))


def _cauchy(v: Tensor, eigenvalues: Tensor, g: Tensor, s: Tensor) -> Tensor:
    """Sum Σ_n v_n / (g − s λ_n) over n and conjugates: v [D, X, K / 2], λ [D, K / 2], g [D, L], s [L] -> [D, X, L].

    A pair together is (2 g Re v − 2 s Re(v λ̄)) / ((g − s λ)(g − s λ̄)), with real numbers above, so one matrix serves both.
    """
    g, rotated = g[:, None], eigenvalues[..., None]
    matrix = 1 / ((g - s * rotated) * (g - s * rotated.conj()))  # [D, K / 2, L]
    plain, turned = ((t.real + 0j) @ matrix for t in (v, v * eigenvalues[:, None].conj()))
    return 2 * (g * plain - s * turned)


def _real(z: Tensor) -> Tensor:
    """Convert complex [D, K / 2] to [D, K]: real parts, then imaginary ones."""
    return torch.cat([z.real, z.imag], -1)


def _rotations(z: Tensor) -> Tensor:
    """Multiplication with complex [D, K / 2] as real matrices [D, K, K]."""
    real, imaginary = torch.diag_embed(z.real), torch.diag_embed(z.imag)
    return torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)
