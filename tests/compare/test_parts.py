"""Parts in which mixers of a comparison differ, against known properties."""

import pytest
import torch

from linattn import mixers
from linattn.compare.parts import parts

KNOWN = [
    # name, options: grows, decay, erases, conv_width, gate, norm, positions
    ("softmax", {}, (True, "none", False, 0, False, False, True)),
    ("softmax", {"rotated": 0}, (True, "none", False, 0, False, False, False)),
    ("softmax", {"conv_width": 3, "gated": True}, (True, "none", False, 3, True, False, True)),
    ("softmax", {"window": 8}, (False, "none", False, 0, False, False, True)),
    ("gla", {}, (False, "channel", False, 0, True, True, False)),
    ("retnet", {}, (False, "constant", False, 0, True, True, True)),
    ("mamba2", {}, (False, "head", False, 4, True, True, False)),
    ("gated_deltanet", {}, (False, "head", True, 4, True, True, False)),
    ("slstm", {}, (False, None, None, 4, None, True, None)),
]


@pytest.mark.parametrize(("name", "options", "wanted"), KNOWN)
def test_parts(name, options, wanted):
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    mixer = mixers.create(name, dim=64, **options).eval()
    after = torch.random.get_rng_state()
    found = parts(mixer, 64)
    assert tuple(found[k] for k in ("grows", "decay", "erases", "conv_width", "gate", "norm", "positions")) == wanted
    assert torch.equal(torch.random.get_rng_state(), after) and not torch.equal(before, after), "the caller's generator stays as it was"
