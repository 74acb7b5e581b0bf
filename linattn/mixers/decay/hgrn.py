"""HGRN (arXiv 2311.04823): an elementwise recurrence whose forget gate has a lower bound that rises from layer to layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.decay.hgrn2 import bound, forget, rising
from linattn.mixers.parts import HeadNorm, to_float32
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
    oracle="fla-core 0.6.0, naive_recurrent_hgrn; the complex recurrence token by token in float64",
    families=("recurrent networks",),
    chinese={
        "HGRN (hierarchically gated recurrent network)": "HGRN（层级门控循环网络）",
        "the complex recurrence token by token in float64": "float64 下逐 token 的复数递推",
    },
)
class HGRN(Mixer):
    """No queries and keys: one state h [rows, dim], read through a norm and a swish gate.

    By default the real recurrence, as in fla's HGRNAttention and its published models: RMS norm, no biases. With ``complex_valued``
    the paper's: α has in each channel a learned angle ``theta`` that rotates h, and both parts of h are read, through a
    layer norm over 2 dim; every map has a bias. That is Hgru1d of the authors' hgru-pytorch, whose ``state_dict`` has the same
    shapes: input_proj, lambda_proj, gate and out_proj are ``v_proj`` (the parts of a channel side by side), ``f_proj``, ``g_proj`` and
    ``o_proj``. Its state is h [rows, dim, 2]. ``lower_bound`` is γ as in :class:`~linattn.mixers.decay.hgrn2.HGRN2`.
    """

    shards = True

    lower_bound: Tensor
    theta: nn.Parameter | None  # [dim], radians a token
    keep_float32 = ("lower_bound", "theta")

    def __init__(self, dim: int, *, lower_bound: float = 0.0, complex_valued: bool = False) -> None:
        super().__init__(dim)
        self.register_buffer("lower_bound", bound(dim, lower_bound))
        parts = 2 if complex_valued else 1
        maps = ((dim, parts * dim), (dim, dim), (dim, parts * dim), (parts * dim, dim))
        self.v_proj, self.f_proj, self.g_proj, self.o_proj = (nn.Linear(*sizes, bias=complex_valued) for sizes in maps)
        self.norm = nn.LayerNorm(2 * dim) if complex_valued else HeadNorm(dim)
        angles = 10000.0 ** (-2 * torch.arange(dim, dtype=torch.float32) / dim)
        self.register_parameter("theta", nn.Parameter(angles) if complex_valued else None)

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        return rising(index, count)

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        decay, new = forget(self.f_proj(x), self.lower_bound)
        b, old = F.silu(to_float32(self.v_proj(x))), call.get("h")
        if self.theta is None:
            b = b * new
        else:
            decay = torch.complex(decay, self.theta.to(decay.dtype).expand_as(decay))
            b = torch.view_as_complex(b.unflatten(-1, (-1, 2)) * new[..., None])
            old = old if old is None else torch.view_as_complex(old.contiguous())
        if call.valid is not None:
            valid = call.valid[..., None]
            decay, b = torch.where(valid, decay, 0.0), torch.where(valid, b, 0.0)
        h, last = diagonal_scan(decay, b, initial_state=old, return_state=True, cu_seqlens=call.cu_seqlens)
        if self.theta is not None:
            h, last = torch.cat([h.real, h.imag], -1), torch.view_as_real(last)
        call.keep("h", last)
        return self.o_proj(self.norm(h.to(x.dtype)) * F.silu(self.g_proj(x)))

    def flops(self, x: Tensor, past: int = 0) -> int:
        maps = sum(p.numel() for p in self.parameters() if p.ndim == 2)
        scan = x.shape[2] if self.theta is None else 4 * x.shape[2]  # α h + b beside the linear maps; of complex numbers
        return x.shape[0] * x.shape[1] * 2 * (maps + scan)
