"""H3, Hungry Hungry Hippos (arXiv 2212.14052): multiplicative interactions around two state-space models, a shift and a diagonal one."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import at_least, to_float32
from linattn.mixers.registry import register
from linattn.mixers.ssm.lti import StateSpace, as_complex, complex_parameter, log_steps, pairs, spectrum
from linattn.ops.checks import no_autocast


@register(
    "h3",
    title="H3 (Hungry Hungry Hippos)",
    paper="Hungry Hungry Hippos: Towards Language Modeling with State Space Models",
    arxiv="2212.14052",
    year=2022,
    seeds=("004",),
    equation=r"o_t = q_t\, \mathrm{SSM}_{\mathrm{diag}}\big(\mathrm{SSM}_{\mathrm{shift}}(k)^\top v\big)_t",
    growth="n log n",
    oracle="espnet 202511, SSKernelDiag, and the equations in a loop",
    chinese={"and the equations in a loop": "以及循环逐步计算的公式"},
)
class H3(StateSpace):
    """A shift system on the keys, the outer product with the values, a diagonal system on each of its entries, read by the query.

    Read in the authors' code (src/models/ssm/h3.py and its kernels, HazyResearch/H3): maps with a bias, heads of ``head_dim``
    channels (default 1, 8 in their language models), both systems with their own D. The shift system's state is the
    last ``state_size`` keys, written by a learned B that starts as (1, 0, ...); the diagonal system starts as S4D-Lin,
    discretised by the bilinear rule. State: ``shift`` [rows, state_size − 1, D], keys, and ``S`` [rows, H, K / 2, head_dim², 2].
    """

    shards = True

    keep_float32 = ("shift_B", "shift_C", "shift_D", "log_dt", "log_A_real", "A_imag", "B", "C", "D")

    def __init__(self, dim: int, *, head_dim: int = 1, state_size: int = 64, dt_min: float = 1e-3, dt_max: float = 0.1) -> None:
        super().__init__(dim)
        if head_dim < 1 or dim % head_dim:
            raise ValueError(f"dim must be a multiple of head_dim, but came as {dim} with head_dim {head_dim}")
        at_least(1, state_size=state_size)
        heads = dim // head_dim
        self.head_dim, self.state_size = head_dim, state_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.shift_B = nn.Parameter(F.one_hot(torch.zeros(dim, dtype=torch.long), state_size).float())  # [D, N]
        self.shift_C = nn.Parameter(torch.empty(dim, state_size, dtype=torch.float32).uniform_(-(state_size**-0.5), state_size**-0.5))
        self.shift_D = nn.Parameter(torch.randn(dim, dtype=torch.float32))
        self.log_dt = nn.Parameter(log_steps(heads, dt_min, dt_max))
        self.log_A_real, self.A_imag = (nn.Parameter(t) for t in spectrum("lin", state_size, heads))  # [H, K / 2]
        one = torch.view_as_real(torch.ones(heads, pairs(state_size), dtype=torch.complex64))
        self.B, self.C = nn.Parameter(one), complex_parameter(heads, pairs(state_size))  # [H, K / 2, 2]
        self.D = nn.Parameter(torch.randn(heads, dtype=torch.float32))
        self.o_proj = nn.Linear(dim, dim)

    def system(self) -> tuple[Tensor, Tensor, Tensor]:
        dt = self.log_dt.exp()[:, None]
        half = torch.complex(-self.log_A_real.exp(), self.A_imag) * dt / 2
        return torch.log1p(half) - torch.log1p(-half), dt / (1 - half) * as_complex(self.B), 2 * as_complex(self.C)

    def shift_kernel(self) -> Tensor:
        """The impulse response of the shift system [D, N]: Σ_j B_j C_{j+t}."""
        n = self.state_size
        shifted = F.pad(to_float32(self.shift_C), (0, n - 1)).unfold(1, n, 1)  # [D, N, N], entry (t, j) is C_{t + j}
        return (shifted @ to_float32(self.shift_B)[..., None])[..., 0]

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (p(x) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, self._shifted(k, call), v))
        return Recurrence(q, k, v, scale=1.0)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        kv = (to_float32(r.k)[..., None] * to_float32(r.v)[..., None, :]).flatten(-2)  # [B, T, H, head_dim · V]
        read = super().attend(replace(r, v=kv), call) + kv * self.D[:, None]
        return (to_float32(r.q)[..., None] * read.unflatten(-1, (self.head_dim, -1))).sum(-2).to(r.v.dtype)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        return super().attend_flops(r, past) * self.head_dim + 2 * r.k.numel() * self.state_size

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))

    def _shifted(self, k: Tensor, call: CallContext) -> Tensor:
        """Convolve [B, T, D] -> [B, T, D] causally, over as many tokens as the shift system's state holds."""
        past = self.state_size - 1
        longer, places = call.context("shift", k, past)
        if k.shape[1] == 0:
            return k
        with no_autocast(k):
            y = F.conv1d(to_float32(longer).mT, self.shift_kernel().flip(-1)[:, None], groups=k.shape[-1]).mT
            y = y if places is None else y.index_select(1, places - past)
            return (y + to_float32(k) * self.shift_D).to(k.dtype)
