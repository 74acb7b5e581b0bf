"""Mixture of block attention against the paper's equations written with loops, and its limits."""

from functools import partial

import pytest
import torch

from linattn.mixers import CallContext, create
from tests.conformance.checks import states
from tests.oracles.compare import distance
from tests.oracles.patterns import assert_pattern


def chosen(q, k, block, blocks):
    """The mask [H, T, T] of equations 3 to 6: block 3 of the keys is scored by the mean of its keys, its own block is always read."""
    tokens, heads, _ = q.shape
    mask = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    for h in range(heads):
        for t in range(tokens):
            own = t // block
            fits = {j: (q[t, h] @ k[j * block : (j + 1) * block, h].mean(0)).item() for j in range(own)}
            read = {own, *sorted(fits, key=fits.get, reverse=True)[: blocks - 1]}
            mask[h, t, : t + 1] = torch.tensor([i // block in read for i in range(t + 1)])
    return mask


@pytest.mark.parametrize("piece", [256, 5])  # queries at a time
@pytest.mark.parametrize(("block", "blocks"), [(4, 3), (3, 1), (1, 4), (7, 2)])
def test_the_papers_equations(block, blocks, piece):
    torch.manual_seed(block)
    mixer = create("moba", dim=32, heads=2, block=block, blocks=blocks).double()
    mixer.piece = piece
    x = 2 * torch.randn(1, 30, 32, dtype=torch.float64)
    r = mixer.project(x, CallContext(x))
    assert_pattern(mixer, x, chosen(r.q[0], r.k[0], block, blocks))


def test_every_block_is_softmax():
    mixer, softmax, x = create("moba", dim=64, block=4, blocks=9), create("softmax", dim=64), torch.randn(2, 33, 64)
    softmax.load_state_dict(mixer.state_dict())
    assert distance(mixer(x), softmax(x)) < 1e-5


@pytest.mark.parametrize("check", [states.check_resume, states.check_packed, states.check_padding, states.check_saved])
def test_states_where_blocks_are_chosen(check):
    check(partial(create, "moba", block=3, blocks=2))
