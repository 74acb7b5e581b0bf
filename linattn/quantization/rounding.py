"""Rounding of matrices to codes and scales, to nearest or with the error of each column compensated by later columns."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.models.quantised import Format
from linattn.ops.torch.quantised import Quantised, group_scale, nearest, packed, row_scale

_PIECE = 128  # columns whose errors are propagated to later columns at once
DAMPING = 0.01  # of the mean of the diagonal of the second moments


def rounded(weight: Tensor, form: Format) -> Quantised:
    """Round ``weight`` [N, K] to nearest; each scale is the one of least squared error among a few."""
    w = weight.detach().float()
    if form.group is None:
        scale = row_scale(w)
        return Quantised(nearest(w, scale[:, None], 127).to(torch.int8), scale)
    groups = w.unflatten(1, (-1, form.group))
    scale = group_scale(groups)
    codes = nearest(groups, scale.float()[..., None], 7)
    return Quantised(packed(codes.flatten(1)), scale)


def compensated(weight: Tensor, form: Format, moments: Tensor) -> Quantised:
    """Round ``weight`` [N, K] column by column, and compensate each column's error by later columns (GPTQ, arXiv 2210.17323).

    For inputs x with second moments H = E[x xᵀ] the error of a row is (w − ŵ) H (w − ŵ)ᵀ. If column i is fixed at ŵ_i, the
    least error of the later columns is reached by w_j −= (w_i − ŵ_i) U_ij / U_ii, with H⁻¹ = Uᵀ U and U upper triangular.

    Args:
        weight: of any dtype.
        form: the format.
        moments: [K, K], of any scale.
    """
    w, upper = weight.detach().float().clone(), _upper(moments)
    numbers = torch.empty_like(w)
    step = form.group or _PIECE
    whole = row_scale(w) if form.group is None else None
    scales = []
    for first in range(0, w.shape[1], step):
        piece = slice(first, first + step)
        scale = whole if whole is not None else group_scale(w[:, piece])
        scales.append(scale)
        numbers[:, piece], errors = _columns(w[:, piece], scale.float(), upper[piece, piece], 127 if form.group is None else 7)
        w[:, piece.stop :] -= errors @ upper[piece, piece.stop :]
    if whole is not None:
        return Quantised(numbers.to(torch.int8), whole)
    return Quantised(packed(numbers), torch.stack(scales, 1))


def _columns(w: Tensor, scale: Tensor, upper: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Round the columns w [N, C] in place; returns codes, and errors divided by U_ii."""
    codes, errors = torch.empty_like(w), torch.empty_like(w)
    for i in range(w.shape[1]):
        codes[:, i] = nearest(w[:, i], scale, largest)
        errors[:, i] = (w[:, i] - codes[:, i] * scale) / upper[i, i]
        w[:, i:] -= errors[:, i, None] * upper[i, i:]
    return codes, errors


def _upper(moments: Tensor) -> Tensor:
    """U [K, K] with H⁻¹ = Uᵀ U, of damped moments H; a channel that is always 0 stands for itself."""
    h = moments.double().clone()
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True).float()
