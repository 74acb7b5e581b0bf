"""Linear attention without a normaliser: the identity as feature map, and a plain sum of all writes."""

from __future__ import annotations

from torch import Tensor

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention
from linattn.mixers.parts import HeadNorm
from linattn.mixers.registry import register


@register(
    "linear",
    title="Linear attention without a normaliser",
    paper="The Devil in Linear Transformer",
    arxiv="2210.10340",
    year=2022,
    seeds=("000", "001", "002", "003"),
    equation=r"S_t = S_{t-1} + k_t^\top v_t,\quad o_t = q_t S_t",
    symmetry="permutation",
    oracle="fla-core 0.6.0, naive_recurrent_linear_attn without normalisation",
    chinese={
        "Linear attention without a normaliser": "不做归一化的线性注意力",
        "naive_recurrent_linear_attn without normalisation": "不做归一化的 naive_recurrent_linear_attn",
    },
)
class Linear(KernelAttention):
    """In place of the division by q·z, which may be zero or negative, a norm over each head of the output.

    ``causal=False`` is the paper's bidirectional language model.
    """

    def __init__(self, dim: int, heads: int = 4, *, causal: bool = True) -> None:
        super().__init__(dim, heads, causal)
        self.norm = HeadNorm(dim // heads)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return Recurrence(*(p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj)))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o).flatten(-2))
