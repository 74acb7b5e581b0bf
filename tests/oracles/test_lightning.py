"""Lightning attention against transformers' MiniMaxLightningAttention with the same weights."""

import pytest
import torch
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention

from linattn.hf.convert.minimax import LIGHTNING
from linattn.mixers import create
from linattn.mixers.context import CallContext
from linattn.models import LanguageModel, LMConfig
from tests.oracles.compare import distance, take


def pair(layer, layers=3, heads=4, head_dim=16):
    config = MiniMaxConfig(
        hidden_size=64, num_attention_heads=heads, num_key_value_heads=heads, num_hidden_layers=layers, block_size=16, vocab_size=8,
        layer_types=["linear_attention"] * layers, hidden_act="silu", head_dim=head_dim,
    )  # fmt: skip
    theirs = MiniMaxLightningAttention(config, layer)
    torch.nn.init.normal_(theirs.norm.weight, 1.0, 0.5)  # away from one
    ours = create("lightning", dim=64, heads=heads, head_dim=head_dim, layer=layer, layers=layers)
    take(ours, theirs.state_dict(), LIGHTNING)
    return ours, theirs


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("tokens", [1, 32, 150])
def test_values_and_gradients(layer, tokens):
    ours, theirs = pair(layer)
    x = torch.randn(2, tokens, 64, requires_grad=True)
    y, (wanted, _) = ours(x), theirs(x, None, None)
    assert distance(y, wanted) < 1e-5
    (gx, gw), (wx, ww) = (torch.autograd.grad(o.square().sum(), (x, m.qkv_proj.weight)) for o, m in ((y, ours), (wanted, theirs)))
    assert distance(gx, wx) < 1e-5
    assert distance(gw, ww) < 1e-5


def test_decoding_with_a_cache():
    ours, theirs = pair(0)
    x, cache, state, y, wanted = torch.randn(2, 41, 64), MiniMaxCache(), None, [], []
    for piece in x.split([37, 1, 1, 1, 1], 1):
        o, state = ours(piece, state, return_state=True)
        y.append(o)
        wanted.append(theirs(piece, None, None, cache)[0])
    assert distance(torch.cat(y, 1), torch.cat(wanted, 1)) < 1e-5
    assert distance(state["S"], cache.get_linear_cache(0)) < 1e-5


def test_heads_of_another_size_and_number():
    ours, theirs = pair(1, heads=6, head_dim=20)
    x = torch.randn(2, 40, 64)
    assert distance(ours(x), theirs(x, None, None)[0]) < 1e-5


def test_a_model_gives_each_layer_its_place():
    config = LMConfig(vocab_size=8, dim=64, layers=3, mixer="lightning", ffn="none")
    for i, layer in enumerate(LanguageModel(config).model.layers):
        ours, (wanted, theirs) = layer.mixer, pair(i)
        assert ours.strength == wanted.strength
        rates = -ours.recurrence(torch.zeros(1, 1, 64), CallContext(torch.zeros(1, 1, 64))).decay
        assert distance(rates, theirs.slope_rate.flatten()) < 1e-6
