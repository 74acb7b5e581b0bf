"""Long short-term memory: its gates read the last output, so it runs token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.context import CallContext
from linattn.mixers.recurrent.layer import RecurrentLayer
from linattn.mixers.registry import register
from linattn.ops.checks import no_autocast

_CLOSED = 1e4  # a gate's input at which its sigmoid is exactly 0 or 1 in every dtype


@register(
    "lstm",
    title="Long short-term memory",
    paper="Long Short-Term Memory (Neural Computation 9(8))",
    year=1997,
    seeds=("000", "001", "003"),
    equation=r"c_t = f_t \odot c_{t-1} + i_t \odot g_t,\quad h_t = o_t \odot \tanh c_t,\quad"
    r" (i, f, g, o)_t = (\sigma, \sigma, \tanh, \sigma)(W x_t + U h_{t-1} + b)",
    linear_in_values=False,
    oracle="torch.nn.LSTM",
    chinese={"Long short-term memory": "长短期记忆（LSTM）"},
)
class LSTM(RecurrentLayer):
    """One layer of ``dim`` cells; the parameters and their names are those of ``torch.nn.LSTM``. State: h and c [rows, D]."""

    layer = nn.LSTM

    def run(self, rows: Tensor, valid: Tensor | None, h: Tensor, call: CallContext) -> Tensor:
        if rows.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            # oneDNN has no bfloat16 LSTM for processors without AVX-512, and torch does not ask before it takes that one.
            dtype = self.weight_ih_l0.dtype
            with no_autocast(rows):
                return self.run(rows.to(dtype), valid, h.to(dtype), call)
        c, w_ih = self.first("c", rows, call), None
        if valid is not None:
            rows, w_ih = self._closing(rows, valid)
        y, last = rows[..., : self.dim], c[None]
        if call.tokens:  # torch rejects an empty sequence
            y, _, last = torch.lstm(rows, (h[None], c[None]), self.weights(w_ih), True, 1, 0.0, torch.is_grad_enabled(), False, True)
        call.keep("c", last.view_as(c))  # torch 2.11 traces it with one more dimension
        return y

    def _closing(self, rows: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """One more input channel, 1 on padding, that closes the input gate and opens the forget gate: padding does not change c."""
        w_ih = self.weight_ih_l0
        column = torch.cat([w_ih.new_full((self.dim, 1), gate) for gate in (-_CLOSED, _CLOSED, 0.0, 0.0)])  # i, f, g, o
        return torch.cat([rows, (~valid)[..., None].to(rows.dtype)], -1), torch.cat([w_ih, column], 1)
