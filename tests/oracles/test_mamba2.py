"""Mamba-2 against transformers' Mamba2Mixer with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from linattn.hf.convert.mamba2 import MIXER
from linattn.mixers import create
from tests.oracles.compare import assert_decoding, assert_left_padding, distance, take


def pair(groups):
    torch.manual_seed(groups)
    config = Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, state_size=12, n_groups=groups, chunk_size=16, num_hidden_layers=1, vocab_size=8
    )
    theirs = Mamba2Mixer(config, 0).eval()
    if groups > 1 and not hasattr(theirs.norm, "group_size"):
        pytest.skip("this transformers normalises over all groups at once, unlike the paper's code and unlike later versions")
    for parameter in (theirs.D, theirs.norm.weight, theirs.conv1d.bias, theirs.dt_bias):  # away from ones and zeros
        torch.nn.init.normal_(parameter, std=0.5)
    how = {"pattern": "mha"} if groups == 4 else {"groups": groups}  # as many groups as heads
    ours = create("mamba2", dim=32, head_dim=16, state_size=12, **how)
    take(ours, theirs.state_dict(), MIXER)
    return ours, theirs, config


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 37])  # 37 is no multiple of the chunk
def test_values_and_gradients(groups, tokens):
    ours, theirs, _ = pair(groups)
    x = torch.randn(2, tokens, 32, requires_grad=True)
    y, wanted = ours(x), theirs(x)
    assert distance(y, wanted) < 1e-5
    (gx, ga), (wx, wa) = (torch.autograd.grad(o.square().sum(), (x, m.A_log)) for o, m in ((y, ours), (wanted, theirs)))
    assert distance(gx, wx) < 1e-5
    assert tokens == 1 or distance(ga, wa) < 1e-5  # from a state of zeros one token does not fade


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_decoding_with_a_cache(groups):
    ours, theirs, config = pair(groups)
    assert_decoding(ours, theirs, DynamicCache(config=config))


def test_padding_on_the_left():
    ours, theirs, _ = pair(1)
    assert_left_padding(ours, theirs)


@pytest.mark.parametrize("pattern", ["mva", "mvs", "mqa", "mka", "mha"])
def test_patterns(pattern):
    """Head by head in float64: which of x, B and C are per head, and which are shared."""
    mixer = create("mamba2", dim=32, head_dim=16, state_size=12, pattern=pattern).double()
    for parameter in (mixer.D, mixer.norm.weight, mixer.conv.bias):
        torch.nn.init.normal_(parameter)
    heads, own = 4, {"mva": "x", "mvs": "x", "mqa": "C", "mka": "B", "mha": "xBC"}[pattern]
    counts = {name: heads if name in own else 1 for name in "xBC"}
    widths = {"x": 16, "B": 12, "C": 12}
    tokens = torch.randn(2, 20, 32, dtype=torch.float64)
    projected = tokens @ mixer.in_proj.weight.T
    total = sum(counts[n] * widths[n] for n in "xBC")
    padded = F.pad(projected[..., :total].mT, (3, 0))
    mixed = F.silu(F.conv1d(padded, mixer.conv.weight, mixer.conv.bias, groups=total)).mT
    dt = F.softplus(projected[..., total:] + mixer.dt_bias)
    parts = dict(zip("xBC", mixed.split([counts[n] * widths[n] for n in "xBC"], -1), strict=True))
    outputs = []
    for h in range(heads):
        x, b, c = (parts[n].unflatten(-1, (counts[n], -1))[:, :, h if n in own else 0] for n in "xBC")
        state, rows = torch.zeros(2, 12, 16, dtype=torch.float64), []
        for t in range(20):
            step = dt[:, t, h, None, None]
            state = torch.exp(-mixer.A_log[h].exp() * step) * state + step * b[:, t, :, None] * x[:, t, None, :]
            rows.append((c[:, t, None] @ state)[:, 0] + mixer.D[h] * x[:, t])
        outputs.append(torch.stack(rows, 1))
    assert distance(mixer(tokens), mixer.read(torch.stack(outputs, 2), tokens)) < 1e-9


def test_refused():
    with pytest.raises(ValueError, match="pattern must be one of"):
        create("mamba2", dim=32, pattern="all")
    with pytest.raises(ValueError, match="groups are for pattern 'mva'"):
        create("mamba2", dim=64, head_dim=32, groups=2, pattern="mqa")
