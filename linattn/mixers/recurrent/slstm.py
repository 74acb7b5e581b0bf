"""sLSTM (xLSTM, arXiv 2405.04517): an LSTM with exponential input gates, a normaliser, and memory that mixes within heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer
from linattn.mixers.context import CallContext
from linattn.mixers.decay.mlstm import HeadLayerNorm
from linattn.mixers.parts import ShortConvolution, head_size, to_float32
from linattn.mixers.registry import register

_STATES = ("h", "c", "n", "m")
_NOTHING = -1e30  # m before the first token: below every gate, and finite


@register(
    "slstm",
    title="sLSTM (xLSTM with scalar memory)",
    paper="xLSTM: Extended Long Short-Term Memory",
    arxiv="2405.04517",
    year=2024,
    equation=r"c_t = \sigma(f_t) c_{t-1} + e^{i_t} \tanh z_t,\quad n_t = \sigma(f_t) n_{t-1} + e^{i_t},\quad"
    r" h_t = \sigma(o_t) \frac{c_t}{n_t},\quad"
    r" (i, f, z, o)_t = W x_t + R h_{t-1} + b",
    linear_in_values=False,
    oracle="xlstm 2.0.6, slstm_forward_pointwise and the layer around it",
    chinese={
        "sLSTM (xLSTM with scalar memory)": "sLSTM（以标量为记忆的 xLSTM）",
        "slstm_forward_pointwise and the layer around it": "slstm_forward_pointwise 及其外层",
    },
)
class SLSTM(Mixer):
    """Gates read the last output, so tokens are processed one by one, in a plain loop.

    Short convolution and SiLU before the input and forget gates, all maps are per head, layer norm per head, no
    output map. c and n are stored divided by e^m, m the larger of the input gate and the decayed last m; states [rows, dim].
    Checked against sLSTMLayer of the package xlstm: R starts at 0, the forget biases fall by a power law from 5 to -7.
    """

    dim: int
    keep_float32 = ("bias",)

    def __init__(self, dim: int, heads: int = 4, *, conv_width: int = 4) -> None:
        super().__init__(dim)
        self.heads, size = heads, head_size("dim", dim, heads)
        self.conv = ShortConvolution(dim, conv_width, bias=True)
        self.weight = nn.Parameter(torch.randn(4, heads, size, size) * (2 / (5 * dim)) ** 0.5)  # [gate i f z o, H, out, in]
        self.recurrent_weight = nn.Parameter(torch.zeros(4, heads, size, size))
        self.bias = nn.Parameter(torch.zeros(4, heads, size))
        self.norm = HeadLayerNorm(dim, eps=1e-5)
        with torch.no_grad():
            self.bias[1] = 5 - 12 * (torch.arange(size) / max(size - 1, 1)) ** 0.3

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        seen = self.conv(x, call)
        both = torch.stack([seen, x], 2).unflatten(-1, (self.heads, -1))  # [B, T, 2, H, V]
        both = both.repeat_interleave(2, 2)  # i and f read the convolution, z and o the token itself
        gates = torch.einsum("btghv,ghuv->btghu", both, self.weight.to(both.dtype))
        rows, valid = call.to_rows((to_float32(gates) + self.bias).flatten(-2))  # [rows, T, 4, D]
        old = [self._first(name, rows, call) for name in _STATES]
        outputs = []
        for t in range(call.tokens):
            new = self._step(rows[:, t], *old)
            old = new if valid is None else [torch.where(valid[:, t, None], a, b) for a, b in zip(new, old, strict=True)]
            outputs.append(old[0])
        for name, value in zip(_STATES, old, strict=True):
            call.keep(name, value)
        h = call.from_rows(torch.stack(outputs, 1)) if outputs else x
        return self.norm(h.unflatten(-1, (self.heads, -1))).to(x.dtype)

    def _step(self, gates: Tensor, h: Tensor, c: Tensor, n: Tensor, m: Tensor) -> list[Tensor]:
        """Step of one token: ``gates`` [rows, 4, D], the states [rows, D]."""
        heads = h.unflatten(-1, (self.heads, -1))
        recurrent = torch.einsum("rhv,ghuv->rghu", heads, self.recurrent_weight.to(h.dtype)).flatten(-2)
        i, f, z, o = (gates + recurrent).unbind(1)
        kept = F.logsigmoid(f) + m
        m = torch.maximum(i, kept)
        i, f = (i - m).exp(), (kept - m).exp()
        c, n = f * c + i * torch.tanh(z), f * n + i  # one of i and f is 1, so n is at least 1
        return [torch.sigmoid(o) * c / n, c, n, m]

    def _first(self, name: str, rows: Tensor, call: CallContext) -> Tensor:
        old = call.get(name)
        start = _NOTHING if name == "m" else 0.0
        return rows.new_full((rows.shape[0], self.dim), start) if old is None else old.to(rows.dtype)

    def flops(self, x: Tensor, past: int = 0) -> int:
        return 2 * x.shape[0] * x.shape[1] * (self.weight.numel() + self.recurrent_weight.numel() + self.conv.weight.numel())

    def load_xlstm(self, weights: Mapping[str, Tensor]) -> None:
        """Load the ``state_dict`` of an sLSTMLayer of the package xlstm (backend "vanilla") of the same sizes.

        Its modules ``fgate`` and ``igate`` have each other's names, and its norm stores the weight's distance from 1.
        """
        own = {"conv.weight": weights["conv1d.conv.weight"], "conv.bias": weights["conv1d.conv.bias"]}
        own["norm.weight"] = 1 + weights["group_norm.weight"]
        own["weight"] = torch.stack([weights[f"{name}.weight"] for name in ("fgate", "igate", "zgate", "ogate")])
        recurrent = weights["slstm_cell._recurrent_kernel_"]  # [H, 4 V, V]
        own["recurrent_weight"] = recurrent.unflatten(1, (4, -1)).transpose(0, 1)
        own["bias"] = weights["slstm_cell._bias_"].view(4, self.heads, -1)
        self.load_state_dict(own)
