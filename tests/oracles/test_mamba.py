"""Mamba against transformers' MambaMixer and FalconMambaMixer with the same weights."""

import pytest
import torch
from transformers import DynamicCache, FalconMambaConfig, FalconMambaModel, MambaConfig, MambaModel

from linattn.hf.convert.mamba import MIXER
from linattn.mixers import create
from tests.oracles.compare import assert_decoding, assert_left_padding, distance, take


def pair(norms=False):
    torch.manual_seed(0)
    kind, model = (FalconMambaConfig, FalconMambaModel) if norms else (MambaConfig, MambaModel)
    config = kind(hidden_size=32, state_size=12, time_step_rank=5, num_hidden_layers=1, vocab_size=8)
    theirs = model(config).eval().layers[0].mixer  # FalconMambaMixer alone fails: it sets norms to 1 before it has any
    for parameter in (theirs.D, theirs.A_log, theirs.conv1d.bias, theirs.dt_proj.bias):  # away from their special values
        torch.nn.init.normal_(parameter, std=0.5)
    ours = create("mamba", dim=32, state_size=12, rank=5, norms=norms)
    take(ours, theirs.state_dict(), MIXER)
    return ours, theirs, config


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("tokens", [1, 75])
def test_values_and_gradients(norms, tokens):
    ours, theirs, _ = pair(norms)
    x = torch.randn(2, tokens, 32, requires_grad=True)
    y, wanted = ours(x), theirs(x)
    assert distance(y, wanted) < 1e-5
    names = ("A_log", "D", "dt_proj.weight", "x_proj.weight") if tokens > 1 else ("D", "dt_proj.weight", "x_proj.weight")
    gradients = [torch.autograd.grad(o.square().sum(), [x, *map(m.get_parameter, names)]) for o, m in ((y, ours), (wanted, theirs))]
    for name, mine, their in zip(("x", *names), *gradients, strict=True):
        assert distance(mine, their) < 1e-5, name


@pytest.mark.parametrize("norms", [False, True])
def test_decoding_with_a_cache(norms):
    ours, theirs, config = pair(norms)
    assert_decoding(ours, theirs, DynamicCache(config=config))


def test_padding_on_the_left():
    ours, theirs, _ = pair()
    assert_left_padding(ours, theirs)
