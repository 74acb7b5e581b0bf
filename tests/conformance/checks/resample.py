"""Checks of resamplers: padding and the new mask."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.conformance.tools import MASK, Make, assert_bits, assert_same, build, graded, tokens


def check_padding(make: Make) -> None:
    """A row's output depends only on its real tokens, as the new mask marks, for any content of padding."""
    mixer, x = build(make), tokens(3, 7)

    def padded(x: Tensor) -> Tensor:
        y, mask = mixer(x, mask=MASK)
        assert mask.dtype == torch.bool and mask.shape == y.shape[:2]
        assert not y[~mask].any(), "the output of padding is 0"
        return y[mask]

    def alone(x: Tensor) -> Tensor:
        return torch.cat([mixer(row[real][None])[0][0] for row, real in zip(x, MASK, strict=True)])

    assert_same(graded(mixer, padded, x), graded(mixer, alone, x), "padded")
    assert_bits(padded(torch.where(MASK[..., None], x, torch.nan)), padded(x), "other padding")
    assert mixer(x)[1] is None, "no mask gives none"
