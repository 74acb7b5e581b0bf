"""Classical recurrent layers: torch's fused layer with padding, packing and a state."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext


class RecurrentLayer(Mixer):
    """One layer of ``dim`` cells; the parameters and their names are those of :attr:`layer`. State: h [rows, D].

    The gates see the last output, so nothing is parallel in time.
    """

    layer: ClassVar[type[nn.RNN | nn.GRU | nn.LSTM]]
    dim: int
    weight_ih_l0: nn.Parameter  # [gates D, D], the gates below each other in torch's order
    weight_hh_l0: nn.Parameter
    bias_ih_l0: nn.Parameter
    bias_hh_l0: nn.Parameter

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        for name, parameter in self.layer(dim, dim).named_parameters():
            self.register_parameter(name, parameter)

    def run(self, rows: Tensor, valid: Tensor | None, h: Tensor, call: CallContext) -> Tensor:
        """Outputs [rows, T, D] of the tokens ``rows`` [rows, T, D] from ``h`` [rows, D]; keeps states besides h."""
        raise NotImplementedError

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        rows, valid = call.to_rows(x)
        h = self.first("h", rows, call)
        y = self.run(rows, valid, h, call)
        outputs = torch.cat([h[:, None].to(y.dtype), y], 1)  # [rows, 1 + T, D]
        call.keep("h", outputs.gather(1, call.counts[:, None, None].expand(-1, -1, self.dim))[:, 0])
        return call.from_rows(y)

    def flops(self, x: Tensor, past: int = 0) -> int:
        return 2 * x.shape[0] * x.shape[1] * (self.weight_ih_l0.numel() + self.weight_hh_l0.numel())

    def first(self, name: str, rows: Tensor, call: CallContext) -> Tensor:
        """Incoming state ``name`` [rows, D], zeros at the start."""
        old = call.get(name)
        return rows.new_zeros(rows.shape[0], self.dim) if old is None else old.to(rows.dtype)

    def weights(self, w_ih: Tensor | None = None) -> list[Tensor]:
        """Weights as torch's functions take them, with ``w_ih`` in place of the layer's own."""
        weights = [self.weight_ih_l0 if w_ih is None else w_ih, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0]
        return _together(weights) if weights[0].is_cuda else weights


def _together(weights: list[Tensor]) -> list[Tensor]:
    """Copy the weights into one block of memory: otherwise cuDNN warns and copies them itself."""
    block = torch.cat([w.flatten() for w in weights]).split([w.numel() for w in weights])
    return [part.view_as(w) for part, w in zip(block, weights, strict=True)]
