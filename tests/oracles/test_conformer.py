"""The Conformer block against transformers' with the same weights, training included, and out of training under padding."""

import pytest
import torch
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as theirs

from linattn.mixers import create
from tests.conformance.checks import bidirectional, calls
from tests.oracles.compare import distance
from tests.oracles.images import shaken


def pair(**sizes):
    torch.manual_seed(0)
    ours = shaken(create("conformer", dim=32, hidden=48, **sizes))
    config = theirs.Wav2Vec2ConformerConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, hidden_act="silu",
        conv_depthwise_kernel_size=ours.conv_module.depthwise_conv.kernel_size[0],
        position_embeddings_type="relative", attention_dropout=0.0, activation_dropout=0.0, hidden_dropout=0.0, conformer_conv_dropout=0.0,
        max_source_positions=60,
    )  # fmt: skip
    config._attn_implementation = "eager"
    other = theirs.Wav2Vec2ConformerEncoderLayer(config).double()
    other.load_state_dict(ours.state_dict())
    positions = theirs.Wav2Vec2ConformerRelPositionalEmbedding(config).double()
    return ours, lambda x: other(x, relative_position_embeddings=positions(x)), other


@pytest.mark.parametrize("sizes", [{}, {"kernel_size": 5}])
@pytest.mark.parametrize("training", [True, False])
def test_transformers(sizes, training):
    """Their table of sinusoids is in float32, of distances up to 59."""
    ours, call, other = pair(**sizes)
    ours.train(training), other.train(training)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = ours(inputs[0]), call(inputs[1])
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert distance(y, wanted) < 1e-6
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, [inputs[0], *dict(sorted(ours.named_parameters())).values()], g)
    expected = torch.autograd.grad(wanted, [inputs[1], *dict(sorted(other.named_parameters())).values()], g)
    assert max(distance(a, b) for a, b in zip(got, expected, strict=True) if b.norm() > 1e-9) < 1e-5
    for name, kept in other.named_buffers():
        torch.testing.assert_close(dict(ours.named_buffers())[name], kept, rtol=1e-5, atol=1e-6)


def test_pieces_of_queries(monkeypatch):
    ours, x = create("conformer", dim=32).double().eval(), torch.randn(2, 23, 32, dtype=torch.float64)
    whole = ours(x)
    monkeypatch.setattr("linattn.mixers.attention.conformer._PIECE", 5)
    assert distance(ours(x), whole) < 1e-12


@pytest.mark.parametrize("check", [bidirectional.check_padding, bidirectional.check_packed, calls.check_rows])
def test_out_of_training(check):
    """With frozen batch statistics padding and other rows change nothing."""
    check(lambda dim: create("conformer", dim=dim).eval())


def test_statistics_are_those_of_real_tokens():
    """Padded rows give the statistics of the same tokens without padding."""
    a, b = (create("conformer", dim=32, kernel_size=1).double() for _ in range(2))
    b.load_state_dict(a.state_dict())
    x = torch.randn(1, 10, 32, dtype=torch.float64)
    a(x), b(torch.cat([x, 1e3 * torch.randn(1, 7, 32).double()], 1), mask=torch.arange(17)[None] < 10)
    for name in ("running_mean", "running_var"):
        assert distance(getattr(b.conv_module.batch_norm, name), getattr(a.conv_module.batch_norm, name)) < 1e-12
