"""Efficient Attention (arXiv 1812.01243): softmax over the channels of a query, and over the tokens for each channel of the keys."""

from __future__ import annotations

from torch import Tensor

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention, log_fading, logsumexp_so_far, only_real, to_tokens
from linattn.mixers.registry import register


@register(
    "efficient_attention",
    title="Efficient Attention",
    paper="Efficient Attention: Attention with Linear Complexities",
    arxiv="1812.01243",
    year=2018,
    seeds=("000", "001"),
    equation=r"o_t = \mathrm{softmax}(q_t) S_t,\quad S_t = \sum_{i \le t} \frac{\exp(k_i)^\top}{\sum_{j \le t} \exp(k_j)^\top} \odot v_i",
    symmetry="permutation",
    oracle="linear-attention-transformer 0.19.1, linear_attn, on all tokens and on every prefix",
    chinese={"on all tokens and on every prefix": "对全部 token，也对每个前缀"},
)
class EfficientAttention(KernelAttention):
    """Each channel of S is an average of the values so far, weighed by a softmax of that channel over time.

    The paper's form, ``causal=False``, takes the softmax over all tokens. Causal, token t takes it over the tokens up to t: with
    L_t = log Σ_{i ≤ t} exp(k_i) that is the recurrence S_t = exp(L_{t-1} - L_t) S_{t-1} + exp(k_t - L_t) v_t, whose decays are at most
    0, so that no exponential overflows. State: S and L, ``log_total`` [rows, H K].
    """

    def __init__(self, dim: int, heads: int = 4, *, causal: bool = True) -> None:
        super().__init__(dim, heads, causal)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.heads_of(x)
        size, k = k.shape, only_real(k.flatten(-2), call)
        before, log, last = logsumexp_so_far(k, call, "log_total")
        if not self.causal:
            log = to_tokens(last, call)
        weight = (k - log).exp().view(size)
        decay = log_fading(before, log).view(size) if self.causal else None
        return Recurrence(q.softmax(-1), weight, v, decay=decay, scale=1.0)
