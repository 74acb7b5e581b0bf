"""Gated DeltaNet against transformers' Qwen3-Next layer with the same weights."""

import pytest
import torch
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from linattn.hf.convert.qwen3_next import delta
from linattn.mixers import CallContext, create
from tests.oracles.compare import assert_decoding, assert_left_padding, distance, take


def pair(heads=2, value_heads=4, key_size=8, value_size=12):
    torch.manual_seed(value_heads)
    config = Qwen3NextConfig(
        hidden_size=32, linear_num_key_heads=heads, linear_num_value_heads=value_heads, linear_key_head_dim=key_size,
        linear_value_head_dim=value_size, num_hidden_layers=1, layer_types=["linear_attention"], vocab_size=8, num_experts=2,
        num_experts_per_tok=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, 0).eval()
    for parameter in (theirs.norm.weight, theirs.dt_bias):  # away from ones
        torch.nn.init.normal_(parameter, std=0.5)
    ours = create("gated_deltanet", dim=32, heads=heads, value_heads=value_heads, key_size=key_size, value_size=value_size)
    take(ours, theirs.state_dict(), delta(ours))
    return ours, theirs, config


@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize("tokens", [1, 70])
def test_values_and_gradients(value_heads, tokens):
    ours, theirs, _ = pair(value_heads=value_heads)
    x = torch.randn(2, tokens, 32, requires_grad=True)
    y, wanted = ours(x), theirs(x)
    assert distance(y, wanted) < 1e-5
    (gx, _), (wx, wa) = (_gradients(layer, x, dtype) for layer, dtype in ((ours, torch.float32), (theirs.double(), torch.float64)))
    assert distance(gx, wx) < 1e-5
    _, ga = _gradients(ours.double(), x, torch.float64)
    # Theirs computes partly in float32, and this sum over tokens cancels: it errs by 5e-6 of the summands' magnitudes.
    assert distance(ga, wa, _summands(ours, x.double())) < 1e-5 or tokens == 1


def _summands(mixer, x):
    """Norm of the sum of the magnitudes of the summands of A_log's gradient: a decay is exp(A_log) times a function of the token."""
    call = CallContext(x)
    r = mixer.project(x, call)
    (g,) = torch.autograd.grad(mixer.read(mixer.attend(r, call), x).square().sum(), r.decay)
    return (g * r.decay).abs().sum((0, 1)).norm().item()


def _gradients(mixer, x, dtype):
    x = x.detach().to(dtype).requires_grad_()
    return torch.autograd.grad(mixer(x).square().sum(), (x, mixer.A_log))


def test_decoding_with_a_cache():
    ours, theirs, config = pair()
    assert_decoding(ours, theirs, DynamicCache(config=config))


def test_padding_on_the_left():
    ours, theirs, _ = pair()
    assert_left_padding(ours, theirs)
