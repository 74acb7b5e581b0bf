"""The GRU and the RNN against torch.nn's with the same weights."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import distance

pytestmark = pytest.mark.parametrize("name", ["gru", "rnn"])


def pair(name):
    theirs = getattr(torch.nn, name.upper())(32, 32, batch_first=True).double()
    ours = create(name, dim=32).double()
    ours.load_state_dict(theirs.state_dict())  # the names are the same
    return ours, theirs


def test_one_pass_and_the_last_state(name):
    ours, theirs = pair(name)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    (y, state), (wanted, h) = ours(x, return_state=True), theirs(x)
    assert distance(y, wanted) < 1e-14
    assert distance(state["h"], h[0]) < 1e-14


def test_gradients(name):
    ours, theirs = pair(name)
    x = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    got, wanted = (torch.autograd.grad(y.square().sum(), (x, *m.parameters())) for m, y in ((ours, ours(x)), (theirs, theirs(x)[0])))
    assert all(distance(a, b) < 1e-13 for a, b in zip(got, wanted, strict=True))


def test_padded_rows_are_as_torch_packs_them(name):
    ours, theirs = pair(name)
    x, lengths = torch.randn(3, 9, 32, dtype=torch.float64), torch.tensor([9, 4, 1])
    mask = torch.arange(9) < lengths[:, None]
    y, state = ours(x, mask=mask, return_state=True)
    wanted, h = theirs(torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))
    wanted, _ = torch.nn.utils.rnn.pad_packed_sequence(wanted, batch_first=True)
    assert distance(y, wanted) < 1e-14
    assert distance(state["h"], h[0]) < 1e-14
