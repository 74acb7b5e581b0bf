"""Hard attention: every token reads its best match, the limit of softmax at temperature 0."""

from __future__ import annotations

from torch import Tensor

from linattn.mixers.attention.weighed import Weighed
from linattn.mixers.registry import register


@register(
    "hard_attention",
    title="Hard attention",
    paper="Show, Attend and Tell: Neural Image Caption Generation with Visual Attention",
    arxiv="1502.03044",
    year=2015,
    seeds=("002", "004"),
    equation=r"o_t = v_i,\quad i = \mathrm{argmax}_{i \le t}\ q_t k_i^\top = \lim_{\beta \to \infty}"
    r" \sum_{i \le t} \mathrm{softmax}_i(\beta\, q_t k_i^\top)\, v_i",
    recurrent=False,
    oracle="x-transformers 2.31.10, Attend(hard=True); softmax attention of ever larger scores",
    chinese={"Hard attention": "硬注意力", "softmax attention of ever larger scores": "得分不断放大的 softmax 注意力"},
)
class HardAttention(Weighed):
    """Ties share the weight, as in the limit. State and parameters are those of ``softmax``.

    The limit has no gradient, so backward uses that of softmax (straight-through estimator, arXiv 1308.3432); the paper samples
    the token and estimates the gradient by REINFORCE.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        causal: False lets every token read all of its sequence.
        rotary: rotates queries and keys by position.
    """

    def weights(self, scores: Tensor) -> Tensor:
        best = (scores == scores.amax(-1, keepdim=True)).to(scores.dtype)
        soft = scores.softmax(-1)
        return best / best.sum(-1, keepdim=True) + (soft - soft.detach())
