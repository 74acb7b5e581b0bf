"""Local attention over a grid against loops over rows and columns, written from section 3.3 of arXiv 1802.05751."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.patterns import assert_pattern, drawn


@pytest.mark.parametrize(("height", "width"), [(1, 1), (4, 6), (7, 5), (3, 13)])
@pytest.mark.parametrize(("rows", "columns", "memory"), [(2, 3, 1), (4, 2, 0), (1, 1, 2), (8, 8, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_loops(height, width, rows, columns, memory, causal):
    ours = create("local_2d", dim=32, rows=rows, columns=columns, memory=memory, causal=causal).double()

    def sees(i, j):
        (y, x), (v, u) = divmod(i, width), divmod(j, width)
        top, left = y - y % rows, x - x % columns
        inside = top - memory <= v < top + rows + (0 if causal else memory) and left - memory <= u < left + columns + memory
        return inside and (j <= i or not causal)

    x = torch.randn(2, height * width, 32, dtype=torch.float64)
    assert_pattern(ours, x, drawn(height * width, sees)[None], height, width)


def test_refusals():
    with pytest.raises(ValueError, match="rows must be at least 1, but came as 0"):
        create("local_2d", dim=32, rows=0)
