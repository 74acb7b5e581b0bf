"""The simple recurrent network: the new state is tanh of a linear map of token and last state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.context import CallContext
from linattn.mixers.recurrent.layer import RecurrentLayer
from linattn.mixers.registry import register


@register(
    "rnn",
    title="Simple recurrent network (Elman)",
    paper="Finding Structure in Time (Cognitive Science 14(2))",
    year=1990,
    seeds=("000", "001", "003", "004"),
    equation=r"h_t = \tanh(W x_t + U h_{t-1} + b)",
    linear_in_values=False,
    oracle="torch.nn.RNN",
    chinese={"Simple recurrent network (Elman)": "简单循环网络（Elman）"},
)
class RNN(RecurrentLayer):
    """One layer of ``dim`` tanh cells; the parameters and their names are those of ``torch.nn.RNN``. State: h [rows, D]."""

    layer = nn.RNN

    def run(self, rows: Tensor, valid: Tensor | None, h: Tensor, call: CallContext) -> Tensor:
        if not call.tokens:  # torch rejects an empty sequence
            return rows
        return torch.rnn_tanh(rows, h[None], self.weights(), True, 1, 0.0, torch.is_grad_enabled(), False, True)[0]
