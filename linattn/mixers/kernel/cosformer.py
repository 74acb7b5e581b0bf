"""cosFormer (arXiv 2202.08791): the ReLU kernel, weighed by a cosine of the distance, which splits into sines and cosines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from linattn.mixers.context import CallContext
from linattn.mixers.kernel.attention import KernelAttention, to_tokens
from linattn.mixers.registry import register
from linattn.ops.checks import values_visible


@register(
    "cosformer",
    title="cosFormer",
    paper="cosFormer: Rethinking Softmax in Attention",
    arxiv="2202.08791",
    year=2022,
    seeds=("001",),
    equation=r"o_t = \frac{\sum_{i \le t} s_{ti} v_i}{\max(\sum_{i \le t} s_{ti}, \varepsilon)},"
    r"\quad s_{ti} = \mathrm{ReLU}(q_t)\, \mathrm{ReLU}(k_i)^\top \cos\left(\frac{\pi}{2} \frac{t - i}{M}\right)",
    oracle="the quadratic formula in float64, written in the test from the paper's equation",
)
class CosFormer(KernelAttention):
    """M is ``length``, the longest sequence: it must be known before the first token, and beyond it weights would turn negative.

    On a CPU, where values can be checked, a position beyond it is an error. Without causality M is the sequence's own number of
    tokens, as in the authors' code; checked there: biases on all four maps, features sine then cosine, the denominator at least 1e-6.
    """

    normalize = "return"

    def __init__(self, dim: int, heads: int = 4, *, length: int = 32768, causal: bool = True) -> None:
        super().__init__(dim, heads, causal, bias=True)
        if length < 1:
            raise ValueError(f"length must be at least 1, but came as {length}")
        self.length = length

    def features(self, q: Tensor, k: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        positions = call.positions + 1  # [B, T]
        if self.causal and positions.numel() and values_visible(positions) and positions.max() > self.length:
            raise ValueError(f"cosformer was made for sequences of length {self.length}, but a token came at {positions.max().item()}")
        length = self.length if self.causal else to_tokens(call.counts, call).clamp(min=1)
        angles = (math.pi / 2 * positions.to(q.dtype) / length)[..., None, None]  # [B, T, 1, 1]
        sin, cos = angles.sin(), angles.cos()
        q, k = q.relu(), k.relu()
        return torch.cat([q * sin, q * cos], -1), torch.cat([k * sin, k * cos], -1)

    def guard(self, denominator: Tensor) -> Tensor:
        return denominator.clamp_min(1e-6)
