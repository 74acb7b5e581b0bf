"""Checks of grid mixers: shapes of the grid."""

from __future__ import annotations

import pytest

from tests.conformance.tools import WIDTH, Make, build, tokens


def check_grid(make: Make) -> None:
    """All shapes are supported, including one row, one column and none; a shape that does not fit the tokens is refused."""
    mixer = build(make)
    for height, width in ((3, 4), (1, 5), (5, 1), (7, 3), (0, 4)):
        assert mixer(tokens(2, height * width), height, width).shape == (2, height * width, WIDTH)
    with pytest.raises(ValueError, match="height"):
        mixer(tokens(2, 12), 5, 2)
