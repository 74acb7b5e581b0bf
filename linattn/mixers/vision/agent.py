"""Agent Attention (arXiv 2312.08874): a few agent tokens attend on behalf of all others."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kinds import GridMixer
from linattn.mixers.parts import head_size
from linattn.mixers.registry import register
from linattn.mixers.vision.parts import depthwise, grid_of, resized, sides, to_image, to_tokens
from linattn.ops.dot_product import dot_product_attention

_BASE = 7  # side of the bias tables that are resized


@register(
    "agent",
    title="Agent Attention",
    paper="Agent Attention: On the Integration of Softmax and Linear Attention",
    arxiv="2312.08874",
    year=2023,
    seeds=("001",),
    equation=r"A = \mathrm{pool}(Q),\quad U = \mathrm{softmax}(A K^\top / \sqrt{d} + B_1)\, V,\quad"
    r" O = \mathrm{softmax}(Q A^\top / \sqrt{d} + B_2)\, U + \mathrm{DWC}(V)",
    kind="grid",
    causal=False,
    oracle="the paper's equations as a loop in float64, and figures of the authors' code",
    families=("down-sampling",),
)
class Agent(GridMixer):
    """A generalised linear attention: both factors of the mixing matrix are softmaxes, its rows sum to one, its rank is that of the agents.

    The agents A are means of the queries over a square of parts of the image. The biases B are sums of a small table resized to the
    image and of tables of its rows and columns (section 4.2). Parameters have the names of the authors' code.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        agents: number of agents, a square number.
        kernel_size: side of the convolution of the values, in tokens.
        grid: height and width, in tokens, of the tables of rows and columns; in between they are interpolated.
        bias: adds a bias to the map to queries, keys and values.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, agents: int = 49, kernel_size: int = 3, grid: tuple[int, int] = (7, 7), bias: bool = True
    ) -> None:
        super().__init__(dim)
        self.side = math.isqrt(max(agents, 0))
        if agents < 1 or self.side**2 != agents:
            raise ValueError(f"agents must be the square of a number of at least 1, but came as {agents}")
        head_size("dim", dim, heads)
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim)
        self.dwc = depthwise(dim, kernel_size)
        height, width = sides(grid)
        self.an_bias, self.na_bias = (_table(heads, agents, _BASE, _BASE) for _ in range(2))
        self.ah_bias, self.aw_bias = _table(1, heads, agents, height, 1), _table(1, heads, agents, 1, width)
        self.ha_bias, self.wa_bias = _table(1, heads, height, 1, agents), _table(1, heads, 1, width, agents)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.qkv(x).chunk(3, -1)
        local = to_tokens(self.dwc(to_image(v, *grid_of(call))))
        q, k, v, local = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v, local))
        return Recurrence(q, k, v, skip=local)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        height, width = grid_of(call)
        parts = F.adaptive_avg_pool2d(to_image(r.q.flatten(-2), height, width), self.side)
        agents = to_tokens(parts).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, agents, K]
        q, k, v = (t.transpose(1, 2) for t in (r.q, r.k, r.v))  # [B, H, T, K]
        gathered = dot_product_attention(agents, k, v, attn_mask=self._gathering(height, width).to(q.dtype))
        return dot_product_attention(q, agents, gathered, attn_mask=self._spreading(height, width).to(q.dtype)).transpose(1, 2)

    def _gathering(self, height: int, width: int) -> Tensor:
        """Bias B₁ [1, H, agents, T] of an agent attending to a token."""
        rows, columns = resized(self.ah_bias[0], height, 1), resized(self.aw_bias[0], 1, width)
        return (resized(self.an_bias, height, width) + rows + columns).flatten(2)[None]

    def _spreading(self, height: int, width: int) -> Tensor:
        """Bias B₂ [1, H, T, agents] of a token attending to an agent."""
        rows, columns = (t[0].movedim(-1, 1) for t in (self.ha_bias, self.wa_bias))  # [H, agents, height, 1], [H, agents, 1, width]
        return (resized(self.na_bias, height, width) + resized(rows, height, 1) + resized(columns, 1, width)).flatten(2).mT[None]

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.v.shape
        return 8 * batch * heads * tokens * self.side**2 * size  # two products for each of the two softmaxes

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.proj(o.flatten(-2))


def _table(*shape: int) -> nn.Parameter:
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))
