"""DeltaNet (arXiv 2406.06484; 2102.11174): a write first removes the value stored under its key."""

from __future__ import annotations

from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import HeadNorm, ShortConvolution, clamp_beta, head_size, to_float32, unit
from linattn.mixers.registry import register


@register(
    "deltanet",
    title="DeltaNet",
    paper="Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
    arxiv="2406.06484",
    year=2024,
    equation=r"S_t = (I - \beta_t k_t^\top k_t) S_{t-1} + \beta_t k_t^\top v_t,\quad \lVert k_t \rVert = 1,\quad o_t = q_t S_t",
    oracle="fla-core 0.6.0, delta_rule_recurrence",
)
class DeltaNet(Mixer):
    """Short convolution and SiLU on q, k and v, queries and keys of unit length, RMS norm per head (section 3.4 of the paper).

    ``negative_eigenvalues`` lets β reach 2 instead of 1, so that the transition has eigenvalues down to -1 (arXiv 2411.12537).
    """

    heads_apart = ("qkv_proj: heads heads heads", "conv: heads heads heads")

    def __init__(self, dim: int, heads: int = 4, *, conv_width: int = 4, negative_eigenvalues: bool = False, eps: float = 1e-5) -> None:
        super().__init__(dim)
        size = head_size("dim", dim, heads)
        self.heads, self.largest_beta = heads, 2.0 if negative_eigenvalues else 1.0
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.b_proj = nn.Linear(dim, heads, bias=False)
        self.conv = ShortConvolution(3 * dim, conv_width)
        self.norm = HeadNorm(size, eps=eps)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.conv(self.qkv_proj(x), call).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = unit(q, dtype=v.dtype), unit(k, dtype=v.dtype)
        return Recurrence(q, k, v, beta=clamp_beta(self.largest_beta * to_float32(self.b_proj(x)).sigmoid(), k))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o).flatten(-2))
