"""The linear recurrent unit (arXiv 2303.06349): a linear recurrent network with a stable initialisation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.parts import positive, to_float32
from linattn.mixers.registry import register
from linattn.mixers.ssm.lti import as_complex, complex_parameter, shared_flops, shared_states


@register(
    "lru",
    title="Linear recurrent unit",
    paper="Resurrecting Recurrent Neural Networks for Long Sequences",
    arxiv="2303.06349",
    year=2023,
    equation=r"h_t = \lambda \odot h_{t-1} + \gamma \odot (B x_t),\quad \lambda = e^{-e^{\nu} + i e^{\theta}},\quad"
    r" o_t = \mathrm{Re}(C h_t) + D x_t",
    linear_in_values=False,
    oracle="LRU-pytorch 0.1.3",
    chinese={"Linear recurrent unit": "线性循环单元（LRU）"},
)
class LRU(Mixer):
    """``state_size`` complex numbers of state, by default as many as channels; then GELU and a gated linear map.

    |λ| starts spread over the ring [r_min, r_max], its phase over [0, max_phase]; γ starts as √(1 − |λ|²) and learns. Read in
    the public reimplementation lru/model.py of NicolasZucchet/minimal-LRU; the paper's own code is not public.
    """

    shards = True

    keep_float32 = ("nu_log", "theta_log", "gamma_log", "B", "C")

    def __init__(
        self, dim: int, *, state_size: int | None = None, r_min: float = 0.0, r_max: float = 1.0, max_phase: float = 2 * math.pi
    ) -> None:
        super().__init__(dim)
        states = dim if state_size is None else state_size
        if states < 1:
            raise ValueError(f"state_size must be at least 1, but came as {states}")
        if not 0 <= r_min < r_max <= 1:
            raise ValueError(f"r_min and r_max must be 0 <= r_min < r_max <= 1, but came as {r_min} and {r_max}")
        positive(max_phase=max_phase)
        radius = torch.rand(states, dtype=torch.float32) * (r_max**2 - r_min**2) + r_min**2  # |λ|²
        radius = radius.clamp(1e-12, 1 - 1e-6)  # a radius of 0 or 1 has no logarithm
        self.nu_log = nn.Parameter(torch.log(-0.5 * torch.log(radius)))
        self.theta_log = nn.Parameter(torch.log(max_phase * (1 - torch.rand(states, dtype=torch.float32))))
        self.gamma_log = nn.Parameter(0.5 * torch.log1p(-radius))
        self.B = complex_parameter(states, dim, std=dim**-0.5)  # [P, D, 2]
        self.C = complex_parameter(dim, states, std=math.sqrt(2 / states))  # [D, P, 2]
        self.D = nn.Parameter(torch.randn(dim))
        self.o_proj = nn.Linear(dim, 2 * dim)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        log = torch.complex(-self.nu_log.exp(), self.theta_log.exp())
        b = self.gamma_log.exp()[:, None] * as_complex(self.B)
        y = shared_states(x, log, b, as_complex(self.C), call)
        y = F.gelu(y + to_float32(x) * self.D).to(x.dtype)
        return F.glu(self.o_proj(y), -1)

    def flops(self, x: Tensor, past: int = 0) -> int:
        return shared_flops(x, self.nu_log.numel(), self.o_proj.weight.numel())
