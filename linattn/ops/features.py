"""Feature maps of queries and keys, whose products approximate or replace the exponential of q·k."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1 of the Linear Transformer (arXiv 2006.16236): x + 1 above zero and eˣ below, where no digits are lost."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def squares(x: Tensor) -> Tensor:
    """[..., d] -> [..., d (d + 1) / 2] with ``squares(q) · squares(k) = (q · k)²``: each pair of channels once, √2 on unequal ones."""
    size = x.shape[-1]
    first, second = torch.triu_indices(size, size, device=x.device)
    twice = x.new_full((), math.sqrt(2))
    return x[..., first] * x[..., second] * torch.where(first == second, 1.0, twice)


def polynomial2(x: Tensor, constant: float = 1.0) -> Tensor:
    """[..., d] -> [..., 1 + d + d (d + 1) / 2], the features of (q·k + constant)²."""
    one = torch.full_like(x[..., :1], constant)
    return torch.cat([one, math.sqrt(2 * constant) * x, squares(x)], -1)


def taylor2(x: Tensor) -> Tensor:
    """[..., d] -> [..., 1 + d + d (d + 1) / 2], the features of 1 + q·k + (q·k)² / 2, exp to second order (arXiv 2402.18668)."""
    return torch.cat([torch.ones_like(x[..., :1]), x, squares(x) * math.sqrt(0.5)], -1)


def both_softmaxes(x: Tensor) -> Tensor:
    """[..., f] -> [..., 2f]: softmax of x and of -x over the channels (Hedgehog, arXiv 2402.04347)."""
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


def waves(x: Tensor) -> Tensor:
    """[..., D] -> [..., 2D]: sines, then cosines; the product of two is Σ cos(x_i - y_i) (Rahimi and Recht 2007; RFA, arXiv 2103.02143)."""
    return torch.cat([x.sin(), x.cos()], -1)


def orthogonal_gaussian(rows: int, columns: int, *, generator: torch.Generator | None = None, device: torch.device | None = None) -> Tensor:
    """[rows, columns] whose rows have the lengths of Gaussian vectors and, in blocks of ``columns``, right angles (arXiv 2009.14794).

    Every row alone is a standard Gaussian vector, so features made of them stay unbiased, with less variance.
    """
    full = torch.randn(-(-rows // columns), columns, columns, generator=generator, device=device)
    directions, triangle = torch.linalg.qr(full)
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]  # for a uniform distribution over rotations
    lengths = torch.randn(rows, columns, generator=generator, device=device).norm(dim=-1, keepdim=True)
    return directions.mT.flatten(0, 1)[:rows] * lengths
