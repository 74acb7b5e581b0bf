"""Charformer (arXiv 2106.12672): GBST, weighted blocks of characters, downsampled to fewer tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linattn.mixers.context import CallContext
from linattn.mixers.kinds import Resampler
from linattn.mixers.memory.attention import check_least, means, softmax_attention
from linattn.mixers.registry import register


@register(
    "charformer",
    title="Charformer's gradient-based subword tokenisation (GBST)",
    paper="Charformer: Fast Character Transformers via Gradient-based Subword Tokenization",
    arxiv="2106.12672",
    year=2021,
    seeds=("001",),
    kind="resample",
    causal=False,
    linear_in_values=False,  # the weights depend on the values
    equation=r"\hat x_t = \sum_{b=1}^{M} P_{tb} X^b_{\lfloor t / b \rfloor},"
    r"\quad P_t = \mathrm{softmax}_b\big(X^b_{\lfloor t / b \rfloor} w\big),"
    r"\quad X^b_j = \mathrm{mean}(x_{bj}, \dots, x_{bj+b-1}),\quad y_i = \mathrm{mean}(\hat x_{d i}, \dots, \hat x_{d i + d - 1})",
    oracle="charformer-pytorch 0.0.4, GBST with a mask",
    exemptions={"resample.reach": "an output depends only on the few tokens that a block and the convolution reach"},
    families=("down-sampling",),
    chinese={
        "Charformer's gradient-based subword tokenisation (GBST)": "Charformer 的可微子词切分（GBST）",
        "GBST with a mask": "带掩码的 GBST",
        "an output depends only on the few tokens that a block and the convolution reach": "输出只来自一块与卷积够得着的几个 token",
    },
)
class Charformer(Resampler):
    """n characters become ⌈n / ``downsample``⌉: each character becomes a weighted mean of the blocks of 1 to ``block`` = M characters that
    contain it, and neighbours are averaged. Blocks at the end hold the remaining characters.

    A convolution over ``kernel_size`` characters comes first, so that the place in a block matters; 0 for none. ``calibrated``
    is the paper's position-wise calibration (section 2.1.4), P ← softmax(P Pᵀ) P: then the cost grows with n².
    """

    def __init__(self, dim: int, *, block: int = 4, downsample: int = 2, kernel_size: int = 5, calibrated: bool = False) -> None:
        super().__init__(dim)
        check_least(1, block=block, downsample=downsample)
        if kernel_size < 0 or (kernel_size and kernel_size % 2 == 0):
            raise ValueError(f"kernel_size must be odd, or 0 for no convolution, but came as {kernel_size}")
        self.block, self.downsample, self.calibrated = block, downsample, calibrated
        self.conv = nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2) if kernel_size else None
        self.score = nn.Linear(dim, 1)

    def resampled(self, lengths: Any) -> Any:
        return (lengths + self.downsample - 1) // self.downsample

    def mix(self, x: Tensor, call: CallContext) -> Tensor:
        if not call.tokens:
            return x
        if self.conv is not None:
            x = self.conv(x.mT).mT
        blocks = [means(x, size, call.counts) for size in range(1, self.block + 1)]  # [B, ⌈T / b⌉, D]
        scores = [self._each(self.score(b), i, x) for i, b in enumerate(blocks, 1)]
        weights = torch.cat(scores, -1).softmax(-1)  # [B, T, M]
        if self.calibrated:
            p = weights[:, :, None]
            weights = softmax_attention(p, p, p, call.valid, scale=1.0)[:, :, 0]
        mixed = sum((weights[..., i - 1 : i] * self._each(b, i, x) for i, b in enumerate(blocks, 1)), torch.zeros_like(x))
        return means(mixed, self.downsample, call.counts)

    def _each(self, t: Tensor, size: int, x: Tensor) -> Tensor:
        """Expand t [B, ⌈T / size⌉, ...], one entry per block, to each token of x [B, T, D]."""
        return t.repeat_interleave(size, 1)[:, : x.shape[1]]
