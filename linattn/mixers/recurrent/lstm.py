"""Long short-term memory, the ancestor: its gates look at the last output, so it can only go token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.carry import Carry
from linattn.mixers.registry import register

_CLOSED = 1e4  # a gate's input at which its sigmoid is exactly 0 or 1 in every dtype


@register(
    "lstm",
    title="Long short-term memory",
    paper="Long Short-Term Memory (Neural Computation 9(8))",
    year=1997,
    seeds=("000", "003"),
    equation=r"c_t = f_t \odot c_{t-1} + i_t \odot g_t,\quad h_t = o_t \odot \tanh c_t,\quad"
    r" (i, f, g, o)_t = (\sigma, \sigma, \tanh, \sigma)(W x_t + U h_{t-1} + b)",
    linear_in_values=False,
    oracle="torch.nn.LSTM",
)
class LSTM(Mixer):
    """One layer of ``dim`` cells; the parameters and their names are those of ``torch.nn.LSTM``. State: h and c [rows, D]."""

    dim: int
    weight_ih_l0: nn.Parameter  # [4D, D], the gates i, f, g, o below each other
    weight_hh_l0: nn.Parameter
    bias_ih_l0: nn.Parameter
    bias_hh_l0: nn.Parameter

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        for name, parameter in nn.LSTM(dim, dim).named_parameters():
            self.register_parameter(name, parameter)

    def mix(self, x: Tensor, carry: Carry) -> Tensor:
        rows, valid = carry.to_rows(x)
        h, c = (self._first(name, rows, carry) for name in ("h", "c"))  # [rows, D]
        w_ih: Tensor = self.weight_ih_l0
        if valid is not None:
            rows, w_ih = self._closing(rows, valid, w_ih)
        y, last = rows[..., : self.dim], c[None]
        if carry.tokens:  # torch's LSTM refuses an empty sequence
            weights, train = [w_ih, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0], torch.is_grad_enabled()
            if rows.is_cuda:
                weights = _together(weights)
            y, _, last = torch.lstm(rows, (h[None], c[None]), weights, True, 1, 0.0, train, False, True)  # as nn.LSTM calls it
        outputs = torch.cat([h[:, None].to(y.dtype), y], 1)  # [rows, 1 + T, D]
        carry.keep("h", outputs.gather(1, carry.counts[:, None, None].expand(-1, -1, self.dim))[:, 0])
        carry.keep("c", last[0])
        return carry.from_rows(y)

    def flops(self, x: Tensor, past: int = 0) -> int:
        return 2 * x.shape[0] * x.shape[1] * (self.weight_ih_l0.numel() + self.weight_hh_l0.numel())

    def _first(self, name: str, rows: Tensor, carry: Carry) -> Tensor:
        old = carry.get(name)
        return rows.new_zeros(rows.shape[0], self.dim) if old is None else old.to(rows.dtype)

    def _closing(self, rows: Tensor, valid: Tensor, w_ih: Tensor) -> tuple[Tensor, Tensor]:
        """One channel more, 1 on filler, that shuts the input gate and opens the forget gate: c passes filler unchanged."""
        column = torch.cat([w_ih.new_full((self.dim, 1), gate) for gate in (-_CLOSED, _CLOSED, 0.0, 0.0)])  # i, f, g, o
        return torch.cat([rows, (~valid)[..., None].to(rows.dtype)], -1), torch.cat([w_ih, column], 1)


def _together(weights: list[Tensor]) -> list[Tensor]:
    """The same in one block of memory: cuDNN warns of anything else and then copies it itself."""
    block = torch.cat([w.flatten() for w in weights]).split([w.numel() for w in weights])
    return [part.view_as(w) for part, w in zip(block, weights, strict=True)]
