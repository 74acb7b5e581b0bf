"""Rounding of matrices to codes and scales, to nearest or with the error of each column compensated by later columns."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.models.quantised import Format
from linattn.ops.torch.quantised import Quantised, group_scale, nearest, packed, row_scale

_PIECE = 128  # columns whose errors are propagated to later columns at once
DAMPING = 0.01  # share of each channel's second moment


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
    Columns with large inputs come first, because most other columns can still compensate them. Scales are chosen before, by the error
    weighted with the diagonal of H.

    Args:
        weight: of any dtype.
        form: the format.
        moments: [K, K], of any scale.
    """
    w, h = weight.detach().float(), _damped(moments)
    squares = h.diagonal().float()
    if form.group is None:
        scale = row_scale(w)
        each, largest = scale[:, None].expand_as(w), 127
    else:
        scale = group_scale(w.unflatten(1, (-1, form.group)), squares.view(-1, form.group))
        each, largest = scale.float().repeat_interleave(form.group, 1), 7
    order = squares.argsort(descending=True)
    codes = torch.empty_like(w)
    codes[:, order] = _rounded_in_turn(w[:, order], each[:, order], _upper(h[order][:, order]), largest)
    return Quantised(codes.to(torch.int8) if form.group is None else packed(codes), scale)


def _rounded_in_turn(w: Tensor, scale: Tensor, upper: Tensor, largest: int) -> Tensor:
    """Codes of the columns of w [N, K] with their scales, from the first column on; w is overwritten."""
    codes = torch.empty_like(w)
    for first in range(0, w.shape[1], _PIECE):
        piece = slice(first, first + _PIECE)
        codes[:, piece], errors = _columns(w[:, piece], scale[:, piece], upper[piece, piece], largest)
        w[:, piece.stop :] -= errors @ upper[piece, piece.stop :]
    return codes


def _columns(w: Tensor, scale: Tensor, upper: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Round the columns w [N, C] in place; returns codes, and errors divided by U_ii."""
    codes, errors = torch.empty_like(w), torch.empty_like(w)
    for i in range(w.shape[1]):
        codes[:, i] = nearest(w[:, i], scale[:, i], largest)
        errors[:, i] = (w[:, i] - codes[:, i] * scale[:, i]) / upper[i, i]
        w[:, i:] -= errors[:, i, None] * upper[i, i:]
    return codes, errors


def _damped(moments: Tensor) -> Tensor:
    """Moments in float64 with a damped diagonal; 1 for a channel that is always 0.

    Damping is relative to each channel's own moment: in many trained models the mean is that of a few channels a thousand times as large
    as the others, and would prevent compensation in those.
    """
    h = moments.double().clone()
    diagonal = h.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal *= 1 + DAMPING
    return h


def _upper(h: Tensor) -> Tensor:
    """U [K, K] with H⁻¹ = Uᵀ U."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True).float()
