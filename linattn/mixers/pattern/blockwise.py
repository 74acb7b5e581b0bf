"""Blockwise attention (BlockBERT, arXiv 1911.02972): in every head each block attends to one block, by a permutation of the blocks."""

from __future__ import annotations

from collections.abc import Sequence

from linattn.mixers.context import CallContext
from linattn.mixers.pattern.attention import PatternAttention, check_groups
from linattn.mixers.registry import register
from linattn.ops.pattern import Pattern, blocks


@register(
    "blockwise",
    title="Blockwise attention (BlockBERT)",
    paper="Blockwise Self-Attention for Long Document Understanding",
    arxiv="1911.02972",
    year=2019,
    seeds=("001",),
    causal=False,
    equation=r"o_t = \sum_{\lfloor i / b \rfloor = \pi_h(\lfloor t / b \rfloor)} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big) v_i,"
    r"\quad \pi_h(j) = (j + s_h) \bmod \lceil n / b \rceil",
    oracle="the quadratic formula in float64 under the mask of the paper's equation 3, written in the test with loops",
    chinese={
        "Blockwise attention (BlockBERT)": "分块注意力（BlockBERT）",
        "the quadratic formula in float64 under the mask of the paper's equation {}": "float64 下的平方形式公式，掩码按论文式 {}",
    },
)
class Blockwise(PatternAttention):
    """Blocks of ``block`` = b tokens; ``shifts`` has the shift s of each of as many equal groups of heads, 0 for a block itself.

    The paper's defaults are blocks of 256 or 171 of 512 tokens and three heads of four with shift 0. Maps have biases, as in BERT.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, block: int = 256, shifts: Sequence[int] = (0, 0, 0, 1), rotary: bool = True
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, causal=False, rotary=rotary, bias=True)
        check_groups("shifts", shifts, heads)
        self.found = [blocks(block, shift=shift) for shift in shifts]

    def patterns(self, call: CallContext) -> Sequence[Pattern]:
        return self.found
