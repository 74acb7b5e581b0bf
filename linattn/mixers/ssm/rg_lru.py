"""The recurrent block of Griffin and RecurrentGemma (arXiv 2402.19427): a real-gated linear recurrent unit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import ShortConvolution, head_size, to_float32
from linattn.mixers.registry import register
from linattn.ops import diagonal_scan

STEEPEST = 1000.0  # bound of the root's derivative


@register(
    "rg_lru",
    title="RG-LRU (Griffin, RecurrentGemma)",
    paper="Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient Language Models",
    arxiv="2402.19427",
    year=2024,
    equation=r"h_t = a_t \odot h_{t-1} + \sqrt{1 - a_t^2} \odot (i_t \odot x_t),\quad"
    r" a_t = e^{-8\, r_t \odot \mathrm{softplus}(\Lambda)},\quad r_t, i_t = \sigma(W x_t + b)",
    oracle="transformers, RecurrentGemmaRecurrentBlock",
)
class RGLRU(Mixer):
    """A branch of short convolution and recurrence, times a GELU branch.

    The gates are block-diagonal maps, a block per head. The first token of a sequence is written without the root, which
    preserves the variance of a running state. Parameters have transformers' shapes (and c = 8 and initialisation).
    State: ``h`` [rows, W] beside that of the convolution.
    """

    shards = True

    keep_float32 = ("recurrent_param",)

    def __init__(self, dim: int, heads: int = 4, *, width: int | None = None, conv_width: int = 4) -> None:
        super().__init__(dim)
        width = dim if width is None else width
        size, self.heads = head_size("width", width, heads), heads
        self.x_proj, self.y_proj = nn.Linear(dim, width), nn.Linear(dim, width)
        self.conv = ShortConvolution(width, conv_width, bias=True, activation=False)
        self.input_gate_weight, self.recurrent_gate_weight = (nn.Parameter(torch.randn(heads, size, size) * size**-0.5) for _ in range(2))
        self.input_gate_bias, self.recurrent_gate_bias = (nn.Parameter(torch.zeros(heads, size)) for _ in range(2))
        radius = torch.empty(width, dtype=torch.float32).uniform_(0.9**2, 0.999**2).sqrt()
        self.recurrent_param = nn.Parameter(torch.log(torch.expm1(-radius.log())))  # softplus of it is −log radius
        self.o_proj = nn.Linear(width, dim)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        u = self.conv(self.x_proj(x), call)
        blocks = u.unflatten(-1, (self.heads, -1))  # [B, T, H, W / H]
        recur = self._gate(blocks, self.recurrent_gate_weight, self.recurrent_gate_bias)
        log = -8.0 * recur * F.softplus(self.recurrent_param)  # [B, T, W]
        first = (call.positions == 0)[..., None]
        size = torch.where(first, 1.0, _root(-torch.expm1(2 * log)))
        v = size * self._gate(blocks, self.input_gate_weight, self.input_gate_bias) * to_float32(u)
        one = v.new_ones(()).expand(*v.shape, 1)
        return Recurrence(one, one, v[..., None], decay=log, scale=1.0)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        assert r.decay is not None
        decay = r.decay.repeat_interleave(r.v.shape[-1], -1)  # equal decays for the signals of a channel
        h, last = diagonal_scan(decay, r.v.flatten(-2), initial_state=call.get("h"), return_state=True, cu_seqlens=call.cu_seqlens)
        call.keep("h", last)
        return h.view_as(r.v)

    def attend_flops(self, r: Recurrence, past: int) -> int:
        return 2 * r.v.numel()

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o[..., 0] * F.gelu(self.y_proj(x), approximate="tanh"))

    @staticmethod
    def _gate(blocks: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return to_float32(torch.einsum("bthi,hij->bthj", blocks, weight) + bias).sigmoid().flatten(-2)


def _root(x: Tensor) -> Tensor:
    """Square root of x whose slope is at most ``STEEPEST`` near 0."""
    flat = x > 1 / (2 * STEEPEST) ** 2
    foot = x.sqrt().detach() + STEEPEST * (x - x.detach())
    return torch.where(flat, torch.where(flat, x, 1.0).sqrt(), foot)
