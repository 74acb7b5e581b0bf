"""RG-LRU against transformers' RecurrentGemmaRecurrentBlock with the same weights; it sums in float32."""

import pytest
import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock, SqrtBoundDerivative

from linattn.hf.convert.recurrent_gemma import RECURRENT
from linattn.mixers import create
from linattn.mixers.ssm.rg_lru import _root
from tests.oracles.compare import distance, take

NAMES = {"linear_x": "x_proj", "linear_y": "y_proj", "linear_out": "o_proj", "conv_1d": "conv"}


def renamed(weights):
    parts = {name: name.removeprefix("rg_lru.").split(".") for name in weights}
    return {".".join([NAMES.get(head, head), *tail]): weights[name] for name, (head, *tail) in parts.items()}


def pair(width=32):
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(hidden_size=32, lru_width=width, num_attention_heads=4, num_hidden_layers=1, vocab_size=8)
    theirs = RecurrentGemmaRecurrentBlock(config, 0)
    ours = create("rg_lru", dim=32, width=width)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.4)
        theirs.rg_lru.recurrent_param.copy_(ours.recurrent_param)
    take(ours, theirs.state_dict(), RECURRENT)
    return ours, theirs


def run(theirs, x, start=0, cache=False):
    positions = torch.arange(start, start + x.shape[1]).expand(x.shape[:2])
    return theirs(x, positions, None, use_cache=cache)[0]


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("tokens", [1, 37, 100])
def test_values_and_gradients(width, tokens):
    ours, theirs = pair(width)
    x = torch.randn(2, tokens, 32, requires_grad=True)
    y, wanted = ours(x), run(theirs, x)
    assert distance(y, wanted) < 1e-5
    got, asked = ([p for _, p in sorted(m)] for m in (ours.named_parameters(), renamed(dict(theirs.named_parameters())).items()))
    got, asked = (
        torch.autograd.grad(o.square().sum(), [x, *p], materialize_grads=True, allow_unused=True) for o, p in ((y, got), (wanted, asked))
    )
    for a, b in zip(got, asked, strict=True):
        assert distance(a, b) < 1e-5 or not (a.any() or b.any())  # the first token does not fade


def test_decoding_with_a_cache():
    ours, theirs = pair()
    x, state, y, wanted, start = torch.randn(2, 24, 32), None, [], [], 0
    for piece in x.split([19, 1, 1, 1, 1, 1], 1):
        o, state = ours(piece, state, return_state=True)
        y.append(o)
        wanted.append(run(theirs, piece, start, cache=True))
        start += piece.shape[1]
    assert distance(torch.cat(y, 1), torch.cat(wanted, 1)) < 1e-5
    assert distance(state["h"], theirs.rg_lru.recurrent_states) < 1e-5


def test_the_root():
    x = torch.tensor([0.0, 1e-9, 2.4e-7, 2.6e-7, 0.3, 1.0], dtype=torch.float64, requires_grad=True)
    y, wanted = _root(x), SqrtBoundDerivative.apply(x)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), x)[0] for o in (y, wanted)))


def test_where_it_starts():
    ours = create("rg_lru", dim=1024)
    radius = torch.exp(-torch.nn.functional.softplus(ours.recurrent_param.detach()))
    assert 0.9 <= radius.min() < 0.902 and 0.998 < radius.max() < 0.9991
    assert abs(ours.input_gate_weight.detach().var().item() * 256 - 1) < 0.02
