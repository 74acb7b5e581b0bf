"""Quantised matrices: int8 with a scale per row, or 4 bits in groups with a scale each.

A weight is its code times its scale. Codes of 8 bits are int8, one scale per row (an output channel). Codes of 4 bits, 0 to 15, stand
for -8 to 7; byte i of the 16 of a block of 32 neighbours has number i in its lower and number i + 16 in its upper half, as in GGUF's Q4_0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUPS = (32, 64, 128)  # neighbours along a row that share a scale, with 4 bits
BLOCK = 32
_LARGEST = 65504.0  # of float16
# Candidate scales as fractions of the value of largest magnitude, whose code is then -8, exactly or by clipping or rounding, or n.
_SHARES = (*(share / -8 for share in (1.0, 0.76, 0.8, 0.84, 0.88, 0.92, 0.96, 1.04, 1.08)), *(1 / n for n in (-7, 7, -6, 6, -5, 5, -4, 4)))


class Quantised(NamedTuple):
    """A matrix [N, K]: int8 ``codes`` [N, K] with float32 ``scale`` [N], or uint8 [N, K / 2] with float16 [N, K / group]."""

    codes: Tensor
    scale: Tensor

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K] of the matrix."""
        rows, columns = self.codes.shape
        return rows, columns if self.bits == 8 else 2 * columns

    @property
    def group(self) -> int:
        """Neighbours that share a scale."""
        return self.shape[1] if self.bits == 8 else self.shape[1] // self.scale.shape[1]


def signed(codes: Tensor) -> Tensor:
    """Codes of 4 bits [..., K / 2] uint8 as int8 [..., K], -8 to 7."""
    blocks = codes.unflatten(-1, (-1, BLOCK // 2))
    return torch.cat([blocks & 15, blocks >> 4], -1).flatten(-2).to(torch.int8) - 8


def packed(numbers: Tensor) -> Tensor:
    """Whole numbers [..., K], -8 to 7, as codes of 4 bits [..., K / 2] uint8: the inverse of :func:`signed`."""
    low, high = (numbers.to(torch.int16) + 8).to(torch.uint8).unflatten(-1, (-1, BLOCK)).chunk(2, -1)
    return (low | high << 4).flatten(-2)


def dequantised(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [..., K] in ``dtype``: products in float32, or in float64 for float64, rounded once."""
    compute_dtype = torch.promote_types(dtype, torch.float32)
    if codes.dtype == torch.int8:
        return (codes.to(compute_dtype) * scale.to(compute_dtype)[..., None]).to(dtype)
    whole = signed(codes).to(compute_dtype).unflatten(-1, (scale.shape[-1], -1))
    return (whole * scale.to(compute_dtype)[..., None]).flatten(-2).to(dtype)


def row_scale(w: Tensor) -> Tensor:
    """Scales [N] of 8 bits, of rows w [N, K]: the largest magnitude of a row gets the code 127."""
    return w.abs().amax(1) / 127


def group_scale(w: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Scales [..] of 4 bits in float16, of groups w [.., group]: the candidate of least squared error, in the sum times ``weight``.

    Values that were quantised before get their scale back, up to rounding.
    """
    largest = w.gather(-1, w.abs().argmax(-1, keepdim=True))[..., 0]
    best, least = torch.zeros_like(largest, dtype=torch.float16), torch.full_like(largest, torch.inf)
    for share in _SHARES:
        scale = (largest * share).clamp(-_LARGEST, _LARGEST).half()
        scales = scale.float()[..., None]
        error = ((w - nearest(w, scales, 7) * scales).square() * weight).sum(-1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def nearest(w: Tensor, scale: Tensor, largest: int) -> Tensor:
    """Whole numbers nearest to w / scale, from -``largest`` (-8 with 4 bits) to ``largest``; 0 where the scale is 0."""
    least = -8 if largest == 7 else -largest
    return torch.where(scale == 0, 0.0, w / scale).round().clamp(least, largest)
