"""BlockBERT against the mask of its equation 3, drawn with loops: no public code of it runs."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.patterns import assert_pattern, drawn


@pytest.mark.parametrize("length", [1, 7, 16, 22])
@pytest.mark.parametrize("shifts", [(0,), (0, 1), (0, 0, 1, 2)])
def test_loops(length, shifts):
    block = 4
    ours, count = create("blockwise", dim=32, block=block, shifts=shifts).double(), -(-length // block)
    masks = [drawn(length, lambda i, j, s=s: j // block == (i // block + s) % count) for s in shifts for _ in range(4 // len(shifts))]
    assert_pattern(ours, torch.randn(2, length, 32, dtype=torch.float64), torch.stack(masks))


def test_refusals():
    with pytest.raises(ValueError, match="the number of shifts must divide the 4 heads"):
        create("blockwise", dim=32, shifts=(0, 1, 2))
