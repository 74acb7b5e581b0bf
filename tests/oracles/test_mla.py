"""Latent attention against transformers' KimiLinearAttention with the same weights, which materialises keys and values of every head."""

import pytest
import torch
from transformers import DynamicCache, KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention

from linattn.hf.convert.kimi_linear import MLA
from linattn.mixers import create
from tests.oracles.compare import distance, take


def pair(**sizes):
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10, **sizes}
    config = KimiLinearConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1, layer_types=["full_attention"], vocab_size=8,
        **sizes,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = KimiLinearAttention(config, 0).eval()
    torch.nn.init.normal_(theirs.kv_a_layernorm.weight, 1.0, 0.5)  # away from ones
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    rank, head_dim, shared, value_dim = (sizes[name] for name in names)
    ours = create("mla", dim=32, heads=4, rank=rank, head_dim=head_dim, shared=shared, value_dim=value_dim)
    return take(ours, theirs.state_dict(), MLA), theirs, config


def causal(queries, keys):
    return torch.full((queries, keys), -torch.inf).triu(keys - queries + 1)[None, None]


@pytest.mark.parametrize("rank", [6, 40])  # below and above a head's size
@pytest.mark.parametrize("tokens", [1, 37])
def test_values_and_gradients(rank, tokens):
    ours, theirs, _ = pair(kv_lora_rank=rank)
    x = torch.randn(2, tokens, 32, requires_grad=True)
    y, (wanted, _) = ours(x), theirs(x, causal(tokens, tokens))
    assert distance(y, wanted) < 1e-5
    parameters = [(m.get_parameter(name)) for m, name in ((ours, "kv_proj.weight"), (theirs, "kv_b_proj.weight"))]
    found = [torch.autograd.grad(o.square().sum(), (x, p)) for o, p in zip((y, wanted), parameters, strict=True)]
    for a, b in zip(*found, strict=True):
        assert distance(a, b) < 1e-5


def test_decoding_with_a_cache():
    ours, theirs, config = pair()
    x, cache, state, y, wanted, past = torch.randn(2, 24, 32), DynamicCache(config=config), None, [], [], 0
    for piece in x.split([19, 1, 1, 1, 1, 1], 1):
        past += piece.shape[1]
        o, state = ours(piece, state, return_state=True)
        y.append(o)
        wanted.append(theirs(piece, causal(piece.shape[1], past), cache)[0])
    assert distance(torch.cat(y, 1), torch.cat(wanted, 1)) < 1e-5
    assert state["k"].shape == (2, 24, 1, 12 + 6)  # one latent per token for any number of heads
