"""S5 (arXiv 2208.04933): one state space for all channels together, run by a scan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.parts import head_size, to_float32
from linattn.mixers.registry import register
from linattn.mixers.ssm.lti import as_complex, log_steps, shared_flops, shared_states
from linattn.ops import hippo


@register(
    "s5",
    title="S5 (simplified state space layer)",
    paper="Simplified State Space Layers for Sequence Modeling",
    arxiv="2208.04933",
    year=2022,
    equation=r"h_t = e^{\Lambda \Delta} h_{t-1} + \Lambda^{-1} (e^{\Lambda \Delta} - 1) \tilde{B} x_t,\quad"
    r" o_t = 2\,\mathrm{Re}(\tilde{C} h_t) + D x_t",
    linear_in_values=False,
    oracle="s5-pytorch 0.1.7, S5SSM",
    chinese={"S5 (simplified state space layer)": "S5（简化的状态空间层）"},
)
class S5(Mixer):
    """``state_size`` real numbers of state for all channels, in ``blocks`` that each start as the normal part of HiPPO-LegS.

    Read in the authors' code (s5/ssm.py, s5/layers.py of lindermanlab/S5): zero-order hold, conjugate pairs kept once, a time
    step for each state, B and C drawn real and transformed by the eigenvectors; then GELU and half a GLU, x σ(W x + b). Their option
    ``clip_eigs``, real parts of at most −1e-4, is always on, as they advise for sequences without an end.
    """

    shards = True

    keep_float32 = ("Lambda_re", "Lambda_im", "B", "C", "log_step")

    def __init__(self, dim: int, *, state_size: int = 256, blocks: int = 8, dt_min: float = 1e-3, dt_max: float = 0.1) -> None:
        super().__init__(dim)
        eigenvalues, _, _, v = hippo.nplr(head_size("state_size", state_size, blocks))
        eigenvalues, v = eigenvalues.repeat(blocks), torch.block_diag(*[v] * blocks).to(torch.complex64)  # [P], [2 P, P]
        self.Lambda_re = nn.Parameter(eigenvalues.real.float())
        self.Lambda_im = nn.Parameter(eigenvalues.imag.float())
        b, c = _normal(state_size, dim, fan=state_size), torch.complex(*(_normal(dim, state_size, fan=state_size) for _ in range(2)))
        self.B = nn.Parameter(torch.view_as_real(v.mH @ b.to(v.dtype)).contiguous())  # [P, D, 2]
        self.C = nn.Parameter(torch.view_as_real(c @ v).contiguous())  # [D, P, 2]
        self.D = nn.Parameter(torch.randn(dim))
        self.log_step = nn.Parameter(log_steps(state_size // 2, dt_min, dt_max)[:, None])
        self.gate_proj = nn.Linear(dim, dim)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        eigenvalues = torch.complex(self.Lambda_re.clamp(max=-1e-4), self.Lambda_im)
        log = eigenvalues * self.log_step.exp()[:, 0]
        b = (torch.expm1(log) / eigenvalues)[:, None] * as_complex(self.B)
        y = shared_states(x, log, b, 2 * as_complex(self.C), call)
        y = F.gelu(y + to_float32(x) * self.D).to(x.dtype)
        return y * torch.sigmoid(self.gate_proj(y)).to(x.dtype)

    def flops(self, x: Tensor, past: int = 0) -> int:
        return shared_flops(x, self.Lambda_re.numel(), self.gate_proj.weight.numel())


def _normal(*shape: int, fan: int) -> Tensor:
    """Normal numbers of variance 1 / ``fan``, truncated at two standard deviations of the untruncated distribution."""
    std = fan**-0.5 / 0.8796256610342398  # standard deviation after truncation
    return nn.init.trunc_normal_(torch.empty(*shape, dtype=torch.float32), std=std, a=-2 * std, b=2 * std)
