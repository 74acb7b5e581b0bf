"""Checks of what mixes over a grid: its shapes."""

from __future__ import annotations

import pytest

from tests.conformance.tools import WIDTH, Make, build, tokens


def check_grid(make: Make) -> None:
    """Every shape serves, one row, one column and none among them; one of other places than there are tokens is refused."""
    mixer = build(make)
    for height, width in ((3, 4), (1, 5), (5, 1), (7, 3), (0, 4)):
        assert mixer(tokens(2, height * width), height, width).shape == (2, height * width, WIDTH)
    with pytest.raises(ValueError, match="height"):
        mixer(tokens(2, 12), 5, 2)
