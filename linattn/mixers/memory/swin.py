"""Swin Transformer (arXiv 2103.14030): windows over an image that shift from layer to layer, and patch merging."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers.base import Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.kinds import GridMixer
from linattn.mixers.memory.attention import Counted, check_least, softmax_attention
from linattn.mixers.parts import head_size
from linattn.mixers.registry import register
from linattn.mixers.vision.parts import grid_of


@register(
    "swin",
    title="Swin Transformer",
    paper="Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
    arxiv="2103.14030",
    year=2021,
    seeds=("001",),
    kind="grid",
    causal=False,
    equation=r"o_t = \sum_{i \in W(t)} \mathrm{softmax}_i\big(q_t k_i^\top / \sqrt{d} + B_{t - i}\big) v_i,\quad"
    r" W(t) = \text{the window of } M \times M \text{ tokens that } t \text{ is in}",
    oracle="transformers, SwinLayer and SwinPatchMerging",
    families=("fixed patterns", "down-sampling"),
    chinese={
        "SwinLayer and SwinPatchMerging": "SwinLayer 与 SwinPatchMerging",
        "the window of ": "一个 ",
        " tokens that ": " 个 token 的窗口，内含 ",
        " is in": "",
    },
)
class Swin(Counted, GridMixer):
    """Windows of ``window`` = M tokens on a side; B is a table of (2M - 1)² biases for each head, by relative position.

    ``shifted`` windows begin ⌊M / 2⌋ tokens further down and to the right; the parts of windows at opposite borders share a
    window, but do not see each other. In a stack every other layer is shifted. Nothing is shifted where height or width fits into one
    window, as in the authors' code. Where M does not divide them, the last windows are not full; there transformers does not mask the
    padding.
    """

    def __init__(self, dim: int, heads: int = 4, *, window: int = 7, shifted: bool = False, bias: bool = True) -> None:
        super().__init__(dim)
        check_least(1, window=window)
        self.heads, self.size, self.window, self.shifted = heads, head_size("dim", dim, heads), window, shifted
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=bias) for _ in range(3))
        self.o_proj = nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(nn.init.trunc_normal_(torch.empty((2 * window - 1) ** 2, heads), std=0.02))

    @classmethod
    def placed(cls, index: int, count: int) -> dict[str, Any]:
        return super().placed(index, count) | {"shifted": index % 2 == 1}

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return Recurrence(q, k, v)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        grid = grid_of(call)
        shift = self.window // 2 if self.shifted and min(grid) > self.window else 0
        q, k, v = (self._windows(t.unflatten(1, grid), shift) for t in (r.q, r.k, r.v))
        o = softmax_attention(q, k, v, self._seen(r.q, grid, shift), bias=self._bias())
        return self._image(o, grid, shift).flatten(1, 2)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))

    def _windows(self, image: Tensor, shift: int) -> Tensor:
        """[B, height, width, H, K] -> [B windows, M M, H, K], padded with zeros."""
        down, right = (-n % self.window for n in image.shape[1:3])
        image = F.pad(image, (0, 0, 0, 0, 0, right, 0, down)).roll((-shift, -shift), (1, 2))
        rows = image.unflatten(2, (-1, self.window)).unflatten(1, (-1, self.window))  # [B, y, M, x, M, H, K]
        return rows.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    def _image(self, windows: Tensor, grid: tuple[int, int], shift: int) -> Tensor:
        """Inverse of :meth:`_windows`, [B, height, width, H, V]."""
        y, x = (-(-n // self.window) for n in grid)
        rows = windows.unflatten(1, (self.window, self.window)).unflatten(0, (-1, y, x)).transpose(2, 3)
        return rows.flatten(3, 4).flatten(1, 2).roll((shift, shift), (1, 2))[:, : grid[0], : grid[1]]

    def _seen(self, like: Tensor, grid: tuple[int, int], shift: int) -> Tensor | None:
        """Visibility in a window, [B windows, M M, M M]: tokens of the same part of the image; None if all are visible."""
        if not shift and not any(n % self.window for n in grid):
            return None
        y, x = (torch.arange(n, device=like.device) < shift for n in grid)  # tokens that wrap around
        label = 1 + 2 * y.long()[:, None] + x.long()
        label = self._windows(label[None, :, :, None, None], shift)[..., 0, 0]  # [windows, M M], 0 where there is no token
        return (label[:, :, None] == label[:, None]).repeat(like.shape[0], 1, 1)

    def _bias(self) -> Tensor:
        """Bias B as a matrix [1, H, M M, M M]."""
        m, device = self.window, self.relative_position_bias_table.device
        place = torch.arange(m * m, device=device)
        y, x = place // m, place % m
        index = (y[:, None] - y + m - 1) * (2 * m - 1) + x[:, None] - x + m - 1
        return self.relative_position_bias_table[index].permute(2, 0, 1)[None]


class PatchMerging(nn.Module):
    """Patch merging between Swin's stages (section 3.1): every two by two tokens become one of twice the width.

    [B, height * width, D] -> [B, ⌈height / 2⌉ * ⌈width / 2⌉, 2 D], zeros where a side is odd; parameters as in the authors' code.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        image = F.pad(x.unflatten(1, (height, width)), (0, 0, 0, width % 2, 0, height % 2))
        four = torch.cat([image[:, row::2, column::2] for column in range(2) for row in range(2)], -1)
        return self.reduction(self.norm(four.flatten(1, 2)))
