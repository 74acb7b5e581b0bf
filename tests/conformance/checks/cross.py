"""Checks of cross mixers: padding on both sides, tokens in pieces, contexts of any length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.conformance.tools import MASK, TOKENS, Make, assert_bits, assert_same, build, graded, tokens


def check_padding(make: Make) -> None:
    """Padding of the tokens and of the context changes nothing for the real ones; without any context the output is finite."""
    mixer, x, context = build(make), tokens(3, 7), tokens(3, 7, seed=5)
    other = MASK.flip(1)

    def padded(x: Tensor, context: Tensor) -> Tensor:
        return mixer(x, context, mask=MASK, context_mask=other)[MASK]

    def alone(x: Tensor, context: Tensor) -> Tensor:
        rows = zip(x, MASK, context, other, strict=True)
        return torch.cat([mixer(a[real][None], b[known][None])[0] for a, real, b, known in rows])

    assert_same(graded(mixer, padded, x, context), graded(mixer, alone, x, context), "padded")
    y = mixer(x, context, mask=MASK, context_mask=other)
    dirty = (torch.where(m[..., None], t, torch.nan) for t, m in ((x, MASK), (context, other)))
    assert_bits(mixer(*dirty, mask=MASK, context_mask=other), y, "other padding")
    assert not y[~MASK].any(), "the output of padding is 0"
    assert mixer(x, context, context_mask=torch.zeros_like(MASK)).isfinite().all(), "without any context"


def check_pieces(make: Make) -> None:
    """Tokens may come in pieces that reuse the first call's state of the context, with gradients."""
    mixer, x, context = build(make), tokens(3, TOKENS), tokens(3, 7, seed=5)

    def pieces(x: Tensor, context: Tensor) -> Tensor:
        first, state = mixer(x[:, :5], context, context_mask=MASK, return_state=True)
        second, state = mixer(x[:, 5:6], state=state, return_state=True)
        assert state["position"].tolist() == [6] * 3
        return torch.cat([first, second, mixer(x[:, 6:], state=state)], 1)

    whole = graded(mixer, lambda x, context: mixer(x, context, context_mask=MASK), x, context)
    assert_same(graded(mixer, pieces, x, context), whole, "in pieces")


def check_context(make: Make) -> None:
    """Contexts of other lengths are supported; none, two, or one with other rows is refused."""
    mixer, x = build(make), tokens(2, 3)
    assert mixer(x, tokens(2, 9)).shape == x.shape
    for wrong in (lambda: mixer(x), lambda: mixer(x, tokens(3, 9)), lambda: mixer(x, x, state={"position": torch.zeros(2).long()})):
        with pytest.raises(ValueError, match="context"):
            wrong()
