"""LinRec (arXiv 2411.01537): queries and keys after an ELU, divided by their Euclidean norm, for long user histories."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention, log_fading, logsumexp_so_far, only_real, to_tokens
from linattn.mixers.registry import register

KEY_NORMS = ("row", "column")


@register(
    "linrec",
    title="LinRec",
    paper="LinRec: Linear Attention Mechanism for Long-term Sequential Recommender Systems",
    arxiv="2411.01537",
    year=2023,
    seeds=("001",),
    equation=r"o_t = \frac{\hat q_t}{\sqrt d} \sum_{i \le t} \hat k_i^\top v_i,"
    r"\quad \hat x = \frac{\mathrm{ELU}(x)}{\lVert \mathrm{ELU}(x) \rVert_2}",
    symmetry="permutation",
    oracle="the authors' equations token by token, and figures of their MultiHeadAttention, which is not causal",
    chinese={
        "the authors' equations token by token": "逐 token 计算作者的公式",
        "and figures of their MultiHeadAttention": "以及作者的 MultiHeadAttention 算出的数",
        "which is not causal": "后者不带因果掩码",
    },
)
class LinRec(KernelAttention):
    """ELU without + 1, so that similarities have both signs; there is no normaliser.

    ``key_norm="row"`` divides each key by its norm over the channels of its head, as the authors' code does; ``"column"`` divides
    each channel by its norm over the tokens, as the paper writes: over all of them, or, causal, over those up to t. With N_t that
    norm, S_t = (N_{t-1} / N_t) S_{t-1} + ELU(k_t) / N_t v_t. Its state is S and 2 log N, ``log_total`` [rows, H K].

    The authors' layer ignores the mask that it is given, so that a token reads later ones: that is ``causal=False``.
    """

    def __init__(self, dim: int, heads: int = 4, *, key_norm: str = "row", causal: bool = True) -> None:
        super().__init__(dim, heads, causal, bias=True)
        if key_norm not in KEY_NORMS:
            raise ValueError(f"key_norm must be one of {', '.join(map(repr, KEY_NORMS))}, but came as {key_norm!r}")
        self.key_norm = key_norm

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.heads_of(x)
        q, k = F.normalize(F.elu(q), dim=-1), F.elu(k)
        if self.key_norm == "row":
            return Recurrence(q, F.normalize(k, dim=-1), v)
        squares = k.square().clamp_min(torch.finfo(k.dtype).tiny).flatten(-2)
        before, log, last = logsumexp_so_far(only_real(squares.log(), call), call, "log_total")  # of N²
        if not self.causal:
            return Recurrence(q, k * (-to_tokens(last, call) / 2).exp().unflatten(-1, k.shape[2:]), v)
        decay = log_fading(before, log) / 2
        return Recurrence(q, k * (-log / 2).exp().view(k.shape), v, decay=decay.view(k.shape))
