"""Axial attention (Axial Transformer, arXiv 1912.12180): over a grid along one axis and then the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.kinds import GridMixer
from linattn.mixers.pattern.attention import PatternAttention
from linattn.mixers.registry import register
from linattn.ops.pattern import Pattern, blocks, strided
from linattn.ops.pattern import causal as earlier


class AlongRows(GridMixer, PatternAttention):
    """Pattern of rows of the grid: blocks of the grid's width. ``causal``: only earlier tokens and the token itself."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        PatternAttention.__init__(self, dim, heads, causal=causal, rotary=False)

    def pattern(self, width: int) -> Pattern:
        return blocks(width)

    def patterns(self, call: CallContext) -> Sequence[Pattern]:
        assert call.grid is not None
        found = self.pattern(max(call.grid[1], 1))
        return [found & earlier() if self.causal else found]


class AlongColumns(AlongRows):
    """Pattern of columns of the grid: every token a multiple of the width away."""

    def pattern(self, width: int) -> Pattern:
        return strided(width)


@register(
    "axial",
    title="Axial attention",
    paper="Axial Attention in Multidimensional Transformers",
    arxiv="1912.12180",
    year=2019,
    seeds=("001",),
    kind="grid",
    causal=False,
    growth="n^1.5",
    linear_in_values=False,  # the second attention reads the output of the first
    equation=r"r = \mathrm{Attention}_{\text{rows}}(x),\quad y = r + \mathrm{Attention}_{\text{columns}}(x + r)",
    oracle="axial-attention 0.6.1, SelfAttention along each axis",
    families=("combined patterns",),
    chinese={
        "Axial attention": "轴向注意力",
        "SelfAttention along each axis": "沿每个轴各做一次 SelfAttention",
        "rows": "行",
        "columns": "列",
    },
)
class Axial(GridMixer):
    """Axial attention: two of the paper's layers, each with a residual around it. No positions: they are added to the tokens.

    ``causal=True`` is the paper's decoder in the order of rows: columns first, masked, after a whole row, with the result shifted one
    row down; then the row up to the token. No output depends on a later token.
    """

    def __init__(self, dim: int, heads: int = 4, *, causal: bool = False) -> None:
        super().__init__(dim)
        self.causal = causal
        self.rows, self.columns = AlongRows(dim, heads, False), AlongColumns(dim, heads, causal)
        self.row = AlongRows(dim, heads, True) if causal else None

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        assert call.grid is not None
        r = self.rows(x, *call.grid)
        r = r + self.columns(x + r, *call.grid)
        if self.row is None:
            return r
        width = call.grid[1]
        above = F.pad(x + r, (0, 0, width, 0))[:, : x.shape[1]]  # output of the row above, which has seen the rows above it
        return above + self.row(x + above, *call.grid)

    def flops(self, x: Tensor, past: int = 0) -> int:
        return sum(m.flops(x) for m in (self.rows, self.columns, self.row) if isinstance(m, Mixer))
