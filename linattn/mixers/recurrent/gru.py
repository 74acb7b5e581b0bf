"""Gated recurrent unit: one state, an update gate between old and new state, a reset gate on the candidate's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.context import CallContext
from linattn.mixers.recurrent.layer import RecurrentLayer
from linattn.mixers.registry import register


@register(
    "gru",
    title="Gated recurrent unit",
    paper="Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation",
    arxiv="1406.1078",
    year=2014,
    seeds=("000",),
    equation=r"h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1},\quad n_t = \tanh(W x_t + b + r_t \odot (U h_{t-1} + b')),\quad"
    r" (r, z)_t = \sigma(W_{rz} x_t + U_{rz} h_{t-1} + b_{rz})",
    linear_in_values=False,
    oracle="torch.nn.GRU",
    chinese={"Gated recurrent unit": "门控循环单元（GRU）"},
)
class GRU(RecurrentLayer):
    """One layer of ``dim`` cells; the parameters and their names are those of ``torch.nn.GRU``. State: h [rows, D].

    As in torch and cuDNN the reset gate acts after the product with U (the paper's acts on h before it), and z keeps the
    old state.
    """

    layer = nn.GRU

    def run(self, rows: Tensor, valid: Tensor | None, h: Tensor, call: CallContext) -> Tensor:
        if not call.tokens:  # torch rejects an empty sequence
            return rows
        return torch.gru(rows, h[None], self.weights(), True, 1, 0.0, torch.is_grad_enabled(), False, True)[0]
