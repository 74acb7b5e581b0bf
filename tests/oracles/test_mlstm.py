"""mLSTM against transformers' xLSTMLayer with the same weights, and against the paper's equations without a stabiliser."""

import pytest
import torch
from transformers import xLSTMConfig
from transformers.models.xlstm import modeling_xlstm

from linattn.hf.convert.xlstm import MIXER
from linattn.mixers import create
from tests.oracles.compare import distance, take


def pair(mode="train", spread=1.0):
    config = xLSTMConfig(
        hidden_size=64, num_heads=4, num_hidden_layers=1, vocab_size=8, autocast_kernel_dtype="float32", mode=mode, chunk_size=16,
    )  # fmt: skip
    theirs = modeling_xlstm.xLSTMLayer(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for gate, bias in ((theirs.igate_preact, -2.0), (theirs.fgate_preact, 3.0)):
        torch.nn.init.normal_(gate.weight, std=spread)
        torch.nn.init.normal_(gate.bias, bias)
    ours = create("mlstm", dim=64)
    take(ours, theirs.state_dict(), MIXER)
    return ours, theirs


@pytest.mark.parametrize("spread", [0.1, 1.0])  # of the input gates: the larger reaches e^15
def test_values_and_gradients(spread):
    ours, theirs = pair(spread=spread)
    x = torch.randn(2, 64, 64)
    assert distance(ours(x), theirs(x)[0]) < 1e-5
    ours, theirs = ours.double(), theirs.double()
    theirs.multihead_norm.force_float32_reductions = False
    x = x.double().requires_grad_()
    y, (wanted, _) = ours(x), theirs(x)
    assert distance(y, wanted) < 1e-12
    found = [torch.autograd.grad(o.square().sum(), (x, *p)) for o, p in ((y, _gates(ours)), (wanted, _gates(theirs)))]
    assert all(distance(a, b) < 1e-11 for a, b in zip(*found, strict=True))


def _gates(mixer):
    layers = (mixer.i_proj, mixer.f_proj) if hasattr(mixer, "i_proj") else (mixer.igate_preact, mixer.fgate_preact)
    return [p for layer in layers for p in layer.parameters()]


def test_decoding_with_a_state():
    ours, theirs = pair("inference")
    x, state, their_state, y, wanted = torch.randn(2, 50, 64), None, None, [], []
    for piece in x.split([45, 1, 1, 1, 1, 1], 1):
        o, state = ours(piece, state, return_state=True)
        y.append(o)
        o, their_state = theirs(piece, their_state)
        wanted.append(o)
    assert distance(torch.cat(y, 1), torch.cat(wanted, 1)) < 1e-5
    for ours_, theirs_ in zip((state["S"], state["z"], state["m"][:, 0]), their_state, strict=True):
        assert distance(ours_, theirs_.reshape(ours_.shape)) < 1e-5


@pytest.mark.parametrize("tokens", [1, 70])
def test_without_a_stabiliser(tokens):
    """The paper's equations unchanged, in float64, where e^15 is harmless."""
    ours = pair()[0].double()
    ours.eps = 0.0
    x = torch.randn(2, tokens, 64, dtype=torch.float64)
    q, k, v = ((x @ p.weight.T).view(2, tokens, 4, -1) for p in (ours.q_proj, ours.k_proj, ours.v_proj))
    i, f = (15 * torch.tanh((x @ p.weight.T + p.bias) / 15) for p in (ours.i_proj, ours.f_proj))
    c, n, outputs = torch.zeros(2, 4, 8, 16, dtype=torch.float64), torch.zeros(2, 4, 8, dtype=torch.float64), []
    for t in range(tokens):
        forget, new = torch.sigmoid(f[:, t, :, None]), i[:, t, :, None].exp()
        key = k[:, t] / 8**0.5
        c = forget[..., None] * c + (new * key)[..., None] * v[:, t, :, None]
        n = forget * n + new * key
        top, bottom = torch.einsum("bhk,bhkv->bhv", q[:, t], c), torch.einsum("bhk,bhk->bh", q[:, t], n)
        outputs.append(top / bottom.abs().clamp(min=1)[..., None])
    h = torch.nn.functional.layer_norm(torch.stack(outputs, 1), (16,), eps=1e-6).flatten(-2) * ours.norm.weight
    wanted = (torch.sigmoid(x @ ours.g_proj.weight.T) * h) @ ours.o_proj.weight.T
    assert distance(ours(x), wanted) < 1e-10


def test_long_memories_do_not_drift():
    """20000 tokens with weak writes and weak decay, in float32 against float64."""
    ours = pair()[0]
    with torch.no_grad():
        ours.i_proj.bias.fill_(-12.0)
        ours.f_proj.bias.fill_(11.0)
        for gate in (ours.i_proj, ours.f_proj):
            gate.weight.mul_(0.1)
    x = torch.randn(1, 20000, 64)
    x[:, 0] *= 10
    with torch.no_grad():
        y, state = ours(x, return_state=True)
        wanted, exact = ours.double()(x.double(), return_state=True)
    assert distance(y, wanted) < 1e-4
    assert distance(state["S"], exact["S"]) < 1e-4
