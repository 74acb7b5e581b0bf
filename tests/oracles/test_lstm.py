"""The LSTM against torch.nn.LSTM with the same weights."""

import torch

from linattn.mixers import create
from tests.oracles.compare import distance


def pair():
    theirs = torch.nn.LSTM(32, 32, batch_first=True).double()
    ours = create("lstm", dim=32).double()
    ours.load_state_dict(theirs.state_dict())  # the names are the same
    return ours, theirs


def test_one_pass_and_the_last_state():
    ours, theirs = pair()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    (y, state), (wanted, (h, c)) = ours(x, return_state=True), theirs(x)
    assert distance(y, wanted) < 1e-14
    assert distance(state["h"], h[0]) < 1e-14
    assert distance(state["c"], c[0]) < 1e-14


def test_padded_rows_are_as_torch_packs_them():
    ours, theirs = pair()
    x, lengths = torch.randn(3, 9, 32, dtype=torch.float64), torch.tensor([9, 4, 1])
    mask = torch.arange(9) < lengths[:, None]
    y, state = ours(x, mask=mask, return_state=True)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    wanted, (h, c) = theirs(packed)
    wanted, _ = torch.nn.utils.rnn.pad_packed_sequence(wanted, batch_first=True)
    assert distance(y, wanted) < 1e-14
    assert distance(state["h"], h[0]) < 1e-14
    assert distance(state["c"], c[0]) < 1e-14
