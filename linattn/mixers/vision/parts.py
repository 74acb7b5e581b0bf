"""Shared parts of image mixers: tokens as an image and back, tables of positions at any resolution, depthwise convolution."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kinds import GridMixer
from linattn.mixers.parts import head_size, to_float32


def to_image(x: Tensor, height: int, width: int) -> Tensor:
    """Convert tokens [B, height * width, D], rows first, to an image [B, D, height, width]."""
    return x.mT.unflatten(2, (height, width))


def to_tokens(image: Tensor) -> Tensor:
    """Convert an image [B, D, height, width] to tokens [B, height * width, D]."""
    return image.flatten(2).mT


def resized(table: Tensor, height: int, width: int) -> Tensor:
    """Resize ``table`` [.., h, w] to another resolution bilinearly; unchanged at its own."""
    if table.shape[-2:] == (height, width):
        return table
    return F.interpolate(to_float32(table), (height, width), mode="bilinear").to(table.dtype)


def depthwise(channels: int, kernel_size: int, *, bias: bool = True) -> nn.Conv2d:
    """Depthwise convolution that keeps the size of the image."""
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be an odd number of at least 1, but came as {kernel_size}")
    return nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=bias)


def sides(grid: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a table's ``grid``; raise ValueError unless it is such a pair."""
    if not isinstance(grid, tuple | list) or len(grid) != 2 or not all(isinstance(side, int) and side > 0 for side in grid):
        raise ValueError(f"grid must be (height, width), both at least 1, but came as {grid!r}")
    height, width = grid
    return height, width


def grid_of(call: CallContext) -> tuple[int, int]:
    """Height and width of the call's grid."""
    return cast("tuple[int, int]", call.grid)


class ConvolvedAttention(GridMixer):
    """Linear attention whose keys have learned positions, plus one depthwise convolution of the values for all heads.

    A subclass gives :meth:`feature`, on all channels together.

    Args:
        dim: width D of the model.
        heads: H; dim must be a multiple.
        kernel_size: side of the convolution in tokens.
        grid: height and width, in tokens, that the positions are learned for; in between they are interpolated.
        bias: adds a bias to the map to queries, keys and values.
    """

    def __init__(self, dim: int, heads: int, *, kernel_size: int, grid: tuple[int, int], bias: bool) -> None:
        super().__init__(dim)
        self.heads, self.grid = heads, sides(grid)
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim)
        self.dwc = depthwise(head_size("dim", dim, heads), kernel_size)
        self.positional_encoding = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1], dim))

    def feature(self, x: Tensor) -> Tensor:
        """Feature map φ of queries or keys [B, T, D] in float32 (float64 for float64)."""
        raise NotImplementedError(f"{type(self).__name__} must implement feature(x)")

    def epsilon(self, tokens: int) -> float:
        """Number added to the denominator φ(q) Σ φ(k)."""
        raise NotImplementedError(f"{type(self).__name__} must implement epsilon(tokens)")

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        height, width = grid_of(call)
        q, k, v = self.qkv(x).chunk(3, -1)
        positions = to_tokens(resized(to_image(self.positional_encoding, *self.grid), height, width))
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)) for t in (self.feature(to_float32(q)), self.feature(to_float32(k) + to_float32(positions)), v)
        )
        return Recurrence(q, k, v, normalize=self.epsilon(x.shape[1]), scale=1.0, skip=self._convolved(v, height, width))

    def _convolved(self, v: Tensor, height: int, width: int) -> Tensor:
        """[B, T, H, V] -> [B, T, H, V], each head an image of its own."""
        images = to_image(v.transpose(1, 2).flatten(0, 1), height, width)
        return to_tokens(self.dwc(images)).unflatten(0, (-1, self.heads)).transpose(1, 2)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.proj(o.flatten(-2))
