"""Kimi Delta Attention against transformers' KimiLinear layer with the same weights, and against fla-core's recurrence."""

import pytest
import torch
from transformers import DynamicCache, KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from linattn.mixers import create
from tests.oracles.compare import assert_decoding, distance, fla, naive_distance


def pair(heads=3, size=8):
    torch.manual_seed(heads)
    config = KimiLinearConfig(
        hidden_size=32, linear_num_heads=heads, linear_head_dim=size, num_hidden_layers=1, layer_types=["linear_attention"],
        vocab_size=8, num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    theirs = KimiLinearDeltaAttention(config, 0).eval()
    for parameter in (
        theirs.o_norm.weight,
        theirs.forget_gate.dt_bias,
        theirs.forget_gate.A_log,
    ):  # away from ones and uninitialised memory
        torch.nn.init.normal_(parameter, std=0.5)
    ours = create("kda", dim=32, heads=heads, size=size, eps=config.rms_norm_eps)
    ours.load_transformers(theirs.state_dict())
    return ours, theirs, config


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 70])
def test_values_and_gradients(heads, tokens):
    ours, theirs, _ = pair(heads)
    x = torch.randn(2, tokens, 32, requires_grad=True)
    y, wanted = ours(x), theirs(x)
    assert distance(y, wanted) < 1e-5
    gx, ga = torch.autograd.grad(y.square().sum(), (x, ours.A_log))
    wx, wa = torch.autograd.grad(wanted.square().sum(), (x, theirs.forget_gate.A_log))
    assert distance(gx, wx) < 1e-5
    assert tokens == 1 or distance(ga, wa.flatten()) < 1e-5


def test_decoding_with_a_cache():
    ours, theirs, config = pair()
    assert_decoding(ours, theirs, DynamicCache(config=config))


@pytest.mark.parametrize("negative", [False, True])
def test_fla(negative):
    def naive(r):
        return fla("kda").naive_recurrent_kda(r.q, r.k, r.v, r.decay, r.beta)[0]

    mixer = create("kda", dim=64, negative_eigenvalues=negative)
    assert naive_distance(mixer, naive, 2 * torch.randn(2, 75, 64)) < 1e-5
