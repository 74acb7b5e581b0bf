"""HGRN (arXiv 2311.04823): an elementwise recurrence whose forget gate has a lower bound that rises from layer to layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.carry import Carry
from linattn.mixers.decay.hgrn2 import bound, forget
from linattn.mixers.parts import HeadNorm, wide
from linattn.mixers.registry import register
from linattn.ops import diagonal_scan


@register(
    "hgrn",
    title="HGRN (hierarchically gated recurrent network)",
    paper="Hierarchically Gated Recurrent Neural Network for Sequence Modeling",
    arxiv="2311.04823",
    year=2023,
    equation=r"h_t = \alpha_t \odot h_{t-1} + (1 - \alpha_t) \odot \mathrm{silu}(x_t W),\quad"
    r" \alpha_t = \gamma + (1 - \gamma)\,\sigma(x_t W_\alpha)",
    linear_in_values=False,
    oracle="fla-core 0.6.0, naive_recurrent_hgrn",
)
class HGRN(Mixer):
    """No queries and keys: one state h [rows, dim], read through an RMS norm and a swish gate.

    The real recurrence, as in fla's HGRNAttention and its published models; the paper also turns h by a constant angle a
    channel, which its successor dropped. ``lower_bound`` is γ as in :class:`~linattn.mixers.decay.hgrn2.HGRN2`.
    """

    lower_bound: Tensor
    keep_float32 = ("lower_bound",)

    def __init__(self, dim: int, *, lower_bound: float = 0.0) -> None:
        super().__init__(dim)
        self.register_buffer("lower_bound", bound(dim, lower_bound))
        self.v_proj, self.f_proj, self.g_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.norm = HeadNorm(dim)

    def mix(self, x: Tensor, carry: Carry) -> Tensor:
        decay, new = forget(self.f_proj(x), self.lower_bound)
        b = F.silu(wide(self.v_proj(x))) * new
        if carry.valid is not None:
            valid = carry.valid[..., None]
            decay, b = torch.where(valid, decay, 0.0), torch.where(valid, b, 0.0)
        h, last = diagonal_scan(decay, b, initial_state=carry.get("h"), return_state=True, cu_seqlens=carry.cu_seqlens)
        carry.keep("h", last)
        return self.o_proj(self.norm(h.to(x.dtype)) * F.silu(self.g_proj(x)))

    def flops(self, x: Tensor, past: int = 0) -> int:
        maps = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        return x.shape[0] * x.shape[1] * 2 * (maps + x.shape[2])  # α h + b beside the linear maps
