"""The Compressive Transformer: compressed slots extend the memory of transformers' XLNet attention."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import distance
from tests.oracles.test_transformer_xl import DIM, pair, segment


@pytest.mark.parametrize("options", [{"compressed": 2}, {"compressed": 50}, {"compressed": 3, "rate": 4}, {"compressed": 0}], ids=str)
def test_segments(options):
    options = {"rate": 2} | options
    ours, theirs, model = pair(name="compressive_transformer", segment=8, memory=4, **options)
    x, rate, wanted = torch.randn(2, 45, DIM, dtype=torch.float64), options["rate"], []
    for s in range(0, 45, 8):
        out = x[:, : max(0, s - 4)]  # has left the memory
        blocks = ours.compress(out.unflatten(1, (-1, rate)).flatten(2)) if out.shape[1] else out
        blocks = blocks[:, max(0, blocks.shape[1] - options["compressed"]) :]
        wanted.append(segment(theirs, model, x[:, s : s + 8], torch.cat([blocks, x[:, max(0, s - 4) : s]], 1)))
    assert distance(ours(x), torch.cat(wanted, 1)) < 1e-6  # their sines and cosines are rounded to float32
    state, y = None, []
    for piece in x.split([5, 1, 13, 26], 1):
        o, state = ours(piece, state, return_state=True)
        y.append(o)
    assert distance(torch.cat(y, 1), ours(x)) < 1e-12
    whole, ours.piece = ours(x), 7  # a few queries at a time
    assert distance(ours(x), whole) < 1e-12 and distance(ours(x[:, 20:], ours(x[:, :20], return_state=True)[1]), whole[:, 20:]) < 1e-12


def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match="multiples of rate"):
        create("compressive_transformer", dim=32, segment=6, memory=8, rate=4)
