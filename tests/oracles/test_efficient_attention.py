"""Efficient Attention against linear-attention-transformer's linear_attn: on all tokens, and, causal, on every prefix."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles import standins
from tests.oracles.compare import distance
from tests.oracles.similarity import assert_bidirectional, assert_forms, merged, projected


def theirs(q, k, v):
    """They also scale the softmax of the queries by d^-1/2; the paper does not (equation 4 and section 3.4)."""
    return standins.linear_attention_transformer().linear_attn(q, k, v) * q.shape[-1] ** 0.5


def test_bidirectional():
    mixer, x = create("efficient_attention", dim=64, causal=False).double(), 3 * torch.randn(2, 41, 64, dtype=torch.float64)
    assert distance(mixer(x), merged(mixer, theirs(*projected(mixer, x)))) < 1e-9
    assert_bidirectional(mixer, x)


def test_layer_with_their_weights():
    layer = standins.linear_attention_transformer().SelfAttention(64, heads=4)
    mixer, x = create("efficient_attention", dim=64, causal=False), torch.randn(2, 41, 64)
    weights = {f"{name}_proj.weight": getattr(layer, f"to_{name}").weight for name in "qkv"}
    mixer.load_state_dict(weights | {"o_proj.weight": layer.to_out.weight * 16**-0.5})
    with torch.no_grad():
        layer.to_out.bias.zero_()
        assert distance(mixer(x), layer(x)) < 1e-5


@pytest.mark.parametrize("size", [1.0, 50.0])
def test_causal_is_bidirectional_on_every_prefix(size):
    mixer, x = create("efficient_attention", dim=64).double(), size * torch.randn(2, 41, 64, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    wanted = torch.cat([theirs(*(t[:, :, : n + 1] for t in (q, k, v)))[:, :, -1:] for n in range(41)], 2)
    assert distance(mixer(x), merged(mixer, wanted)) < 1e-9
    assert_forms(mixer, x)


def test_keys_that_would_overflow():
    """exp of a key of 1000 is infinite in float64; a larger later key only decays the earlier ones."""
    mixer = create("efficient_attention", dim=32).double()
    with torch.no_grad():
        mixer.k_proj.weight.copy_(1000 * torch.eye(32))
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    wanted = torch.cat([theirs(*(t[:, :, : n + 1] for t in (q, k, v)))[:, :, -1:] for n in range(20)], 2)
    assert distance(mixer(x), merged(mixer, wanted)) < 1e-9
