"""Kimi Delta Attention (arXiv 2510.26692): the delta rule with a decay per channel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, at_least, clamp_beta, head_size, time_steps, to_float32, unit
from linattn.mixers.registry import register


@register(
    "kda",
    title="Kimi Delta Attention",
    paper="Kimi Linear: An Expressive, Efficient Attention Architecture",
    arxiv="2510.26692",
    year=2025,
    equation=r"S_t = (I - \beta_t k_t^\top k_t)\,\mathrm{Diag}(\alpha_t) S_{t-1} + \beta_t k_t^\top v_t,\quad"
    r" \alpha_t = \exp(-e^{A}\,\mathrm{softplus}(x_t W_1 W_2 + b)),\quad o_t = q_t S_t",
    oracle="transformers, KimiLinearDeltaAttention",
)
class KDA(Mixer):
    """The linear layer of Kimi Linear: a decay per channel and an output gate, both by low-rank maps, of the rank of a head's size.

    Short convolution and SiLU on q, k and v, queries and keys of unit length, RMS norm per head and then a sigmoid gate.
    ``negative_eigenvalues`` lets β reach 2 instead of 1 (arXiv 2411.12537). Checked against the code in transformers and
    the authors' in fla: the state decays before the key reads it, and the gate is a sigmoid, not SiLU. ``gate_bias`` gives
    the second map of the gate a bias, as fla does.
    """

    heads_apart = ("qkv_proj: heads heads heads", "conv: heads heads heads")

    keep_float32 = ("A_log", "dt_bias")

    def __init__(
        self, dim: int, heads: int = 4, *, size: int | None = None, conv_width: int = 4, eps: float = 1e-6,
        negative_eigenvalues: bool = False, gate_bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim)
        self.heads, self.largest_beta = heads, 2.0 if negative_eigenvalues else 1.0
        self.size = head_size("dim", dim, heads) if size is None else size
        at_least(1, heads=heads, size=self.size)
        inner = heads * self.size
        self.qkv_proj = nn.Linear(dim, 3 * inner, bias=False)
        self.conv = ShortConvolution(3 * inner, conv_width)
        self.decay_proj = nn.Sequential(nn.Linear(dim, self.size, bias=False), nn.Linear(self.size, inner, bias=False))
        self.b_proj = nn.Linear(dim, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(time_steps(heads, self.size))
        self.g_proj = nn.Sequential(nn.Linear(dim, self.size, bias=False), nn.Linear(self.size, inner, bias=gate_bias))
        self.norm = HeadNorm(self.size, eps=eps)
        self.o_proj = nn.Linear(inner, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.conv(self.qkv_proj(x), call).unflatten(-1, (3, self.heads, self.size)).unbind(2)
        q, k = unit(q, dtype=v.dtype), unit(k, dtype=v.dtype)
        decay = -self.A_log.exp()[:, None] * F.softplus(to_float32(self.decay_proj(x).unflatten(-1, (self.heads, -1))) + self.dt_bias)
        return Recurrence(q, k, v, decay=decay, beta=clamp_beta(self.largest_beta * to_float32(self.b_proj(x)).sigmoid(), k))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        gate = to_float32(self.g_proj(x)).sigmoid()
        return self.o_proj((to_float32(self.norm(o)).flatten(-2) * gate).to(o.dtype))

    def load_transformers(self, weights: Mapping[str, Tensor]) -> None:
        """Load the ``state_dict`` of transformers' KimiLinearDeltaAttention of the same sizes."""
        own = {"qkv_proj.weight": torch.cat([weights[f"{name}_proj.weight"] for name in "qkv"]), "conv.weight": weights["conv1d.weight"]}
        for ours, theirs in (("decay_proj", "forget_gate.f"), ("g_proj", "g")):
            own |= {f"{ours}.{i}.weight": weights[f"{theirs}_{part}_proj.weight"] for i, part in enumerate("ab")}
        own |= {f"{name}.weight": weights[f"{name}.weight"] for name in ("b_proj", "o_proj")}
        own |= {"norm.weight": weights["o_norm.weight"], "A_log": weights["forget_gate.A_log"].flatten()}
        self.load_state_dict(own | {"dt_bias": weights["forget_gate.dt_bias"].unflatten(0, (self.heads, -1))})
