"""S4D (arXiv 2206.11893): a diagonal state space for each channel, the same for every token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.registry import register
from linattn.mixers.ssm.lti import StateSpace, as_complex, complex_parameter, log_steps, pairs, spectrum, values


@register(
    "s4d",
    title="S4D (diagonal state spaces)",
    paper="On the Parameterization and Initialization of Diagonal State Space Models",
    arxiv="2206.11893",
    year=2022,
    seeds=("000", "004"),
    equation=r"h_t = e^{\Delta A} h_{t-1} + \frac{e^{\Delta A} - 1}{A} x_t,\quad o_t = 2\,\mathrm{Re}(C h_t) + D x_t,\quad"
    r" A_n = -\tfrac{1}{2} + i \pi n",
    growth="n log n",
    oracle="espnet 202511, SSKernelDiag and the equations in a loop",
    chinese={
        "S4D (diagonal state spaces)": "S4D（对角状态空间）",
        "SSKernelDiag and the equations in a loop": "SSKernelDiag，以及循环逐步计算的公式",
    },
)
class S4D(StateSpace):
    """Zero-order hold, then GELU and a gated linear map (GLU), as in the paper's minimal code, models/s4/s4d.py of state-spaces/s4.

    ``init``: the eigenvalues that A starts from, ``"lin"`` (S4D-Lin) or ``"inv"`` (S4D-Inv). Read there: B is 1 and part of C,
    time steps are e^log_dt, log-uniform in [1e-3, 0.1], one a channel, and C starts complex normal of variance 1.
    """

    keep_float32 = ("log_dt", "log_A_real", "A_imag", "C")

    def __init__(self, dim: int, *, state_size: int = 64, init: str = "lin", dt_min: float = 1e-3, dt_max: float = 0.1) -> None:
        super().__init__(dim)
        self.state_size = state_size
        self.log_dt = nn.Parameter(log_steps(dim, dt_min, dt_max))
        self.log_A_real, self.A_imag = (nn.Parameter(t) for t in spectrum(init, state_size, dim))  # [D, K / 2]
        self.C = complex_parameter(dim, pairs(state_size))
        self.D = nn.Parameter(torch.randn(dim))
        self.o_proj = nn.Linear(dim, 2 * dim)

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        a = torch.complex(-self.log_A_real.exp(), self.A_imag)
        log = a * self.log_dt.exp()[:, None]
        return log, torch.expm1(log) / a, 2 * as_complex(self.C)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return values(x, skip=x * self.D)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return F.glu(self.o_proj(F.gelu(o[..., 0])), -1)
