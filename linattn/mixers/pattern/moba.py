"""MoBA (mixture of block attention, arXiv 2502.13189): every query reads its own block and those with the highest score of their mean
key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.mixers.attention.scores import PIECE, cached, pieces, softmax
from linattn.mixers.attention.softmax import Softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import at_least, to_float32
from linattn.mixers.pattern.learned import best, block_means, in_blocks
from linattn.mixers.registry import register


@register(
    "moba",
    title="MoBA (mixture of block attention)",
    paper="MoBA: Mixture of Block Attention for Long-Context LLMs",
    arxiv="2502.13189",
    year=2025,
    equation=r"o_t = \sum_{i \in I_t} \mathrm{softmax}_{i \in I_t}\big(q_t k_i^\top / \sqrt{d}\big) v_i,\quad"
    r" I_t = \{\, i \le t : \lfloor i / b \rfloor = \lfloor t / b \rfloor \ \text{or}\ \lfloor i / b \rfloor \in J_t \,\},\quad"
    r" J_t = \mathrm{top}_{n-1}\Big\{ q_t \tfrac1b \sum_{i \in \text{block } j} k_i^\top : j < \lfloor t / b \rfloor \Big\}",
    recurrent=False,
    oracle="the paper's equations with loops in float64, and softmax attention where every block is chosen",
    families=("learnable patterns", "sparse"),
    chinese={
        "MoBA (mixture of block attention)": "MoBA（块注意力混合）",
        "or": "或",
        "block ": "块 ",
        "the paper's equations with loops in float64": "float64 下用循环写出的论文公式",
        "and softmax attention where every block is chosen": "以及选中所有块时的 softmax 注意力",
    },
)
class MoBA(Softmax):
    """Blocks of ``block`` = b tokens, of which a query reads ``blocks`` = n: its own up to itself, and the n - 1 earlier ones of highest
    score.

    The choice has no parameters and no gradient. The paper has b = 512 and n = 3 at 8,192 tokens, and b = 4096 and n = 12 for a million.
    It decodes with full attention; here a step equals one pass over all tokens. Ties with the last chosen block
    are included. All scores are computed, so time grows as for softmax. Parameters are those of ``softmax``; the state also
    has the position of every slot.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        block: tokens in a block.
        blocks: number of blocks that a query reads, its own included.
        rotary: rotates queries and keys by position.
    """

    packs = False
    piece = PIECE

    def __init__(self, dim: int, heads: int = 4, *, block: int = 128, blocks: int = 3, rotary: bool = True) -> None:
        super().__init__(dim, heads, rotated=None if rotary else 0)
        at_least(1, block=block, blocks=blocks)
        self.block, self.blocks = block, blocks

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        position = call.positions
        slots, _, before = cached(call, k=r.k, v=r.v, place=position if call.valid is None else torch.where(call.valid, position, -1))
        k, v, place = slots["k"], slots["v"], slots["place"]
        means, out = block_means(to_float32(k), place, self.block), []
        for start, stop in pieces(call.tokens, self.piece):
            last, q = before + stop, to_float32(r.q[:, start:stop])
            seen = self._seen(q, means, position[:, start:stop], place[:, :last])
            scores = torch.einsum("rthk,rshk->rhts", q, to_float32(k[:, :last])) * self.size**-0.5
            out.append(softmax(scores, seen, v[:, :last]))
        return torch.cat(out, 1)

    def _seen(self, q: Tensor, means: Tensor, now: Tensor, place: Tensor) -> Tensor:
        """Slots at ``place`` visible to queries q [rows, T, H, K] at positions ``now`` [rows, T]: [rows, H, T, slots]."""
        own = (now // self.block)[:, None, :, None]  # [rows, 1, T, 1]
        fits = torch.einsum("rthk,rbhk->rhtb", q.detach(), means.detach())
        block = torch.arange(means.shape[1], device=q.device)
        chosen = best(fits.masked_fill(block >= own, -torch.inf), self.blocks - 1) | (block == own)
        seen = in_blocks(chosen, place, self.block) & (place[:, None] <= now[..., None])[:, None]
        return seen | ~seen.any(-1, keepdim=True)  # padding after a row's tokens

    def attend_flops(self, r: Recurrence, past: int) -> int:
        batch, tokens, heads, size = r.q.shape
        return super().attend_flops(r, past) + 2 * batch * heads * tokens * ((past + tokens) // self.block) * size
