"""CA-Stream (arXiv 2404.14996): a class token attends to a convolutional network's features, stage by stage, instead of their mean."""

from __future__ import annotations

from torch import Tensor, nn

from linattn.mixers.attention.across import Across
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import head_size
from linattn.mixers.registry import register


@register(
    "ca_stream",
    title="CA-Stream, cross-attention pooling",
    paper="CA-Stream: Attention-based pooling for interpretable image recognition",
    arxiv="2404.14996",
    year=2024,
    seeds=("001",),
    equation=r"q_{\ell + 1} = W_\ell \sum_j \mathrm{softmax}_j\big(q_\ell f_j^\top / \sqrt{d}\big)\, f_j",
    kind="cross",
    causal=False,
    growth="n^2",
    oracle="the authors' equations as a loop in float64, and figures of the authors' code",
    families=("down-sampling",),
    chinese={"CA-Stream, cross-attention pooling": "CA-Stream：交叉注意力池化"},
)
class CAStream(Across):
    """Step of the stream: the features f_j of a stage are keys and values without maps; one map follows their weighted mean.

    A class token that passes such a step at every stage replaces mean pooling of the last one; its weights are an attribution map,
    ``linattn.mixing_matrix(mixer, token, features)``.

    Args:
        dim: width D of the stage.
        heads: H; the authors have 1.
    """

    def __init__(self, dim: int, heads: int = 1) -> None:
        super().__init__(dim)
        head_size("dim", dim, heads)
        self.heads = heads
        self.proj = nn.Linear(dim, dim)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        assert call.across is not None
        features = call.across.tokens
        q, k = (t.unflatten(-1, (self.heads, -1)) for t in (x, features))
        return Recurrence(q, k, k)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.proj(o.flatten(-2))
