"""Additive attention (arXiv 1409.0473): a decoder's state selects the words of the source it needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.attention.across import Across
from linattn.mixers.attention.scores import pieces, softmax
from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import to_float32
from linattn.mixers.registry import register


@register(
    "bahdanau",
    title="Additive attention (Bahdanau)",
    paper="Neural Machine Translation by Jointly Learning to Align and Translate",
    arxiv="1409.0473",
    year=2014,
    seeds=("001",),
    equation=r"c_t = \sum_j \mathrm{softmax}_j\big(v_a^\top \tanh(W_a s_t + U_a h_j)\big)\, h_j",
    kind="cross",
    causal=False,
    growth="n^2",
    oracle="espnet 202511, AttAdd, with its scaling of 1",
    chinese={"Additive attention (Bahdanau)": "加性注意力（Bahdanau）", "with its scaling of {}": "缩放取 {}"},
)
class Bahdanau(Across):
    """The tokens s_t (the decoder's last states in the paper) attend to the context h_j; the output is a mean of the context.

    Args:
        dim: width D of the model.
        hidden: channels in which tokens and context are compared; dim by default (the paper: 1000 for both).
    """

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__(dim)
        hidden = dim if hidden is None else hidden
        if hidden < 1:
            raise ValueError(f"hidden must be at least 1 channel, but came as {hidden}")
        self.q_proj = nn.Linear(dim, hidden, bias=False)  # W_a
        self.k_proj = nn.Linear(dim, hidden)  # U_a
        self.score = nn.Linear(hidden, 1, bias=False)  # v_a

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        assert call.across is not None
        context = call.across.tokens
        return Recurrence(self.q_proj(x)[:, :, None], self.k_proj(context)[:, :, None], context[:, :, None])

    def attend_context(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        means = []
        for start, stop in pieces(q.shape[1], self.piece):
            together = torch.tanh(to_float32(q[:, start:stop, None, 0]) + to_float32(k[:, None, :, 0]))  # [B, Tq, T, K]
            scores = (together @ to_float32(self.score.weight[0]))[:, None]
            means.append(softmax(scores, seen[:, None], v))
        return torch.cat(means, 1)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return o[:, :, 0]
