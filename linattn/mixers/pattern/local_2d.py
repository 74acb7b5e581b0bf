"""Local attention over a grid (Image Transformer, arXiv 1802.05751, section 3.3): blocks of an image with their surroundings."""

from __future__ import annotations

from collections.abc import Sequence

from linattn.mixers.context import CallContext
from linattn.mixers.kinds import GridMixer
from linattn.mixers.pattern.attention import PatternAttention
from linattn.mixers.registry import register
from linattn.ops.pattern import GridBlocks, Pattern
from linattn.ops.pattern import causal as earlier


@register(
    "local_2d",
    title="Local attention, over a grid",
    paper="Image Transformer",
    arxiv="1802.05751",
    year=2018,
    seeds=("001",),
    kind="grid",
    causal=False,
    equation=r"o_t = \sum_{i \in N(t)} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big) v_i,\quad"
    r" N(t) = \text{the block of } t \text{ and a margin of } m \text{ around it}",
    oracle="the quadratic formula in float64, with a loop over rows and columns written in the test from section 3.3",
    chinese={
        "Local attention, over a grid": "局部注意力，在网格上",
        "with a loop over rows and columns written in the test from section {}": "测试中按第 {} 节用行列循环写出",
        "the block of ": "分块，包含 ",
        " and a margin of ": "，外加四周 ",
        " around it": " 格",
    },
)
class Local2D(GridMixer, PatternAttention):
    """Blocks of ``rows`` times ``columns`` tokens, each with ``memory`` = m rows above and below and m columns on both sides.

    ``causal=True`` is the paper's decoder: of those, the earlier tokens in the order of rows, and the token itself. Without positions,
    which are added to the tokens.
    """

    def __init__(self, dim: int, heads: int = 4, *, rows: int = 8, columns: int = 8, memory: int = 4, causal: bool = False) -> None:
        PatternAttention.__init__(self, dim, heads, causal=causal, rotary=False)
        for name, value, least in (("rows", rows, 1), ("columns", columns, 1), ("memory", memory, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, but came as {value}")
        self.rows, self.columns, self.memory = rows, columns, memory

    def patterns(self, call: CallContext) -> Sequence[Pattern]:
        assert call.grid is not None
        below = 0 if self.causal else self.memory
        found = GridBlocks(max(call.grid[1], 1), self.rows, self.columns, self.memory, below, self.memory)
        return [found & earlier() if self.causal else found]
