"""Sparse Transformer (arXiv 1904.10509): two patterns that together reach every token, in separate heads or merged."""

from __future__ import annotations

from collections.abc import Sequence

from linattn.mixers.context import CallContext
from linattn.mixers.pattern.attention import PatternAttention, check_groups
from linattn.mixers.registry import register
from linattn.ops.pattern import Pattern, blocks, joined, local, strided, summaries
from linattn.ops.pattern import causal as earlier

KINDS = ("strided", "fixed")


@register(
    "sparse_transformer",
    title="Sparse Transformer",
    paper="Generating Long Sequences with Sparse Transformers",
    arxiv="1904.10509",
    year=2019,
    seeds=("001",),
    equation=r"o_t = \sum_{i \in A_t} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d}\big) v_i,\quad"
    r" A_t = \{\, i \le t : t - i < l \ \text{or}\ (t - i) \bmod l = 0 \,\}",
    recurrent=False,
    growth="n^1.5",
    oracle="openai/sparse_attention, get_attn_mask in float64",
    families=("fixed patterns", "combined patterns"),
    chinese={"get_attn_mask in float64": "float64 下的 get_attn_mask", "or": "或"},
)
class SparseTransformer(PatternAttention):
    """``kind="strided"``: the last ``stride`` = l tokens, including itself, and every l-th one. ``"fixed"``: the block of l tokens that a
    token is in, and the last ``summary`` tokens of every block.

    With ``merged`` every head has both patterns, else half of the heads each. l should be about the root of the length: the work is n
    l + n² / l, so then n^1.5; the default is that of 16,384 tokens.
    """

    def __init__(
        self, dim: int, heads: int = 4, *, kind: str = "strided", stride: int = 128, summary: int = 8, merged: bool = True,
        causal: bool = True, rotary: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, causal=causal, rotary=rotary)
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, but came as {kind!r}")
        if stride < 1:
            raise ValueError(f"stride must be at least 1, but came as {stride}")
        near = local(stride - 1, 0 if causal else stride - 1)
        both = (blocks(stride), summaries(stride, summary)) if kind == "fixed" else (near, strided(stride))
        found = [joined(both)] if merged else list(both)
        check_groups("merged=False: two kinds of heads", found, heads)
        self.found = found

    def patterns(self, call: CallContext) -> Sequence[Pattern]:
        return [p & earlier() for p in self.found] if self.causal else self.found
