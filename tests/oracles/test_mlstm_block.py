"""The block of the original xLSTM against the package xlstm's mLSTMLayer and, around it, mLSTMBlock, with the same weights."""

import importlib
import sys
from functools import cache
from types import ModuleType

import pytest
import torch

from linattn.mixers import create
from linattn.models import LanguageModel, LMConfig
from tests.oracles import wheels
from tests.oracles.compare import distance


@cache
def package():
    """mLSTM's part of the wheel under a private name: the whole package would load sLSTM's kernels too."""
    name = "_linattn_oracle_xlstm"
    parent = ModuleType(name)
    parent.__path__ = [str(wheels.path("xlstm==2.0.6") / "xlstm")]
    sys.modules[name] = parent
    return importlib.import_module(f"{name}.blocks.mlstm.layer")


def pair(dim=32, heads=4, tokens=75):
    """Theirs is built for a maximum length. No parameter is at a special value."""
    layer = package()
    config = layer.mLSTMLayerConfig(embedding_dim=dim, num_heads=heads, context_length=tokens)
    theirs = layer.mLSTMLayer(config).double()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.add_((2.0 if name.startswith("mlstm_cell") and "gate" in name else 0.3) * torch.randn_like(p))
    ours = create("mlstm_block", dim=dim, heads=heads).double()
    ours.load_xlstm(theirs.state_dict())
    return ours, theirs


def steps(theirs, x):
    state, outputs = {}, []
    for t in range(x.shape[1]):
        y, state = theirs.step(x[:, t : t + 1], **state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("dim", [32, 96])  # 96 is rounded up to 192 inside
def test_steps(dim):
    """Their states start at m = 0 here, like ours: outputs and states agree to the last digits."""
    ours, theirs = pair(dim)
    x = torch.randn(2, 40, dim, dtype=torch.float64)
    with torch.no_grad():
        (y, state), (wanted, last) = ours(x, return_state=True), steps(theirs, x)
    assert distance(y, wanted) < 1e-12
    size = state["S"].shape[-1]
    for name, t, scale in zip(("S", "z", "m"), last["mlstm_state"], (size**-0.5, size**-0.5, 1.0), strict=True):  # they scale keys
        assert distance(scale * state[name].flatten(), t.flatten()) < 1e-12
    assert distance(state["conv"], last["conv_state"][0][:, 1:]) < 1e-12


def test_gradients_of_the_parallel_form():
    """Of every parameter, without the epsilon of the normaliser, which they divide by another m."""
    ours, theirs = pair()
    ours.eps, cell = 0.0, theirs.mlstm_cell
    parallel, cell.backend_fn = cell.backend_fn, lambda **given: parallel(**given, eps=0.0)
    x = torch.randn(2, 75, 32, dtype=torch.float64, requires_grad=True)
    y, wanted = ours(x), theirs(x)
    assert distance(y, wanted) < 1e-11
    found = [torch.autograd.grad((o * o.detach().cos()).sum(), [x, *m.parameters()]) for o, m in ((y, ours), (wanted, theirs))]
    own = {name: g for (name, _), g in zip(theirs.named_parameters(), found[1][1:], strict=True)}
    own["mlstm_cell.outnorm.weight"] = own["mlstm_cell.outnorm.weight"] - 1  # which loading adds
    mapped = create("mlstm_block", dim=32).double()
    mapped.load_xlstm(own)
    assert distance(found[0][0], found[1][0]) < 1e-10
    for (name, wanted), got in zip(mapped.named_parameters(), found[0][1:], strict=True):
        assert distance(got, wanted) < 1e-9, name


def test_a_model_of_blocks():
    """x + mLSTMLayer(norm(x)), three times, is their mLSTMBlock."""
    config = LMConfig(vocab_size=9, dim=32, layers=3, mixer="mlstm_block", ffn="none", norm="layer")
    ours, x = LanguageModel(config).double().model, torch.randn(1, 20, 32, dtype=torch.float64)
    wanted = x
    for layer in ours.layers:
        theirs = pair()[1]
        layer.mixer.load_xlstm(theirs.state_dict())
        with torch.no_grad():
            wanted = wanted + steps(theirs, layer.mixer_norm(wanted))[0]
    assert distance(ours(embeddings=x)[0], ours.norm(wanted)) < 1e-11


def test_the_beginning():
    """As theirs, except for biases of convolutions, which are 0 in all our mixers."""
    theirs, ours = package().mLSTMLayer(package().mLSTMLayerConfig(embedding_dim=512, context_length=8)), create("mlstm_block", dim=512)
    wanted = create("mlstm_block", dim=512)
    wanted.load_xlstm(theirs.state_dict())
    for (name, a), b in zip(ours.named_parameters(), wanted.parameters(), strict=True):
        if a.unique().numel() > 1000:
            assert abs(a.std() / b.std() - 1) < 0.05, name
        elif name not in ("i_proj.bias", "conv.bias"):
            assert torch.equal(a, b), name


def test_bad_groups_are_refused():
    with pytest.raises(ValueError, match="group must divide the inner width 64, but came as 3"):
        create("mlstm_block", dim=32, group=3)
