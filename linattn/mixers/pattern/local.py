"""Local attention (Image Transformer, arXiv 1802.05751): blocks of queries that see their own block and some tokens around it."""

from __future__ import annotations

from collections.abc import Sequence

from linattn.mixers.context import CallContext
from linattn.mixers.pattern.attention import PatternAttention
from linattn.mixers.registry import register
from linattn.ops.pattern import Pattern, blocks
from linattn.ops.pattern import causal as earlier


@register(
    "local",
    title="Local attention, in blocks",
    paper="Image Transformer",
    arxiv="1802.05751",
    year=2018,
    seeds=("001",),
    equation=r"o_t = \sum_{i \in N(t)} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big) v_i,\quad"
    r" N(t) = \{\, i \le t : i \ge b \lfloor t / b \rfloor - m \,\}",
    oracle="local-attention 1.11.2, LocalAttention with one block back",
    chinese={"Local attention, in blocks": "局部注意力，分块", "LocalAttention with one block back": "回看一块的 LocalAttention"},
)
class Local(PatternAttention):
    """Blocks of ``block`` = b tokens, each with the ``memory`` = m tokens before it; without causality also the m after it.

    The window moves with blocks, not with tokens: the first token of a block sees m others, the last one b - 1 more. (``softmax`` with
    a ``window`` slides with every token.) With m = 0 it is the local attention that memory-compressed attention
    alternates with.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, block: int = 128, memory: int = 128, causal: bool = True, rotary: bool = True
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, causal=causal, rotary=rotary)
        self.pattern = blocks(block, before=memory, after=0 if causal else memory)

    def patterns(self, call: CallContext) -> Sequence[Pattern]:
        return [self.pattern & earlier() if self.causal else self.pattern]
