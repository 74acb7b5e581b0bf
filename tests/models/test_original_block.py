"""The original Transformer's block, post-norm, against torch's, with the same weights."""

import pytest
import torch
from torch import nn

from linattn import LMConfig
from linattn.models.block import Block
from tests.oracles.compare import distance

OPTIONS = {"softmax": {"heads": 4, "rotated": 0, "bias": True, "out_bias": True}}


def pair(**options):
    """Our block and torch's, in float64, with norms away from their initial values."""
    torch.manual_seed(0)
    ours = Block(
        LMConfig(
            dim=32, layers=1, mixer="softmax", mixer_options=OPTIONS, ffn="mlp", ffn_options={"mlp": options}, norm="layer", block="post"
        ),
        0,
    ).double()
    for norm in (ours.mixer_norm, ours.ffn_norm):
        nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    theirs = nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=False, dtype=torch.float64, **options)
    w = ours.state_dict()
    weights = {f"self_attn.in_proj_{kind}": torch.cat([w[f"mixer.{n}_proj.{kind}"] for n in "qkv"]) for kind in ("weight", "bias")}
    names = {"self_attn.out_proj": "mixer.o_proj", "linear1": "ffn.fc1", "linear2": "ffn.fc2", "norm1": "mixer_norm", "norm2": "ffn_norm"}
    weights |= {f"{a}.{kind}": w[f"{b}.{kind}"] for a, b in names.items() for kind in ("weight", "bias")}
    theirs.load_state_dict(weights)
    return ours, theirs


@pytest.mark.parametrize("activation", ["relu", "gelu"])  # the original has relu, and so has torch by default
def test_torch(activation):
    ours, theirs = pair(activation=activation)
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    runs = []
    for call, norm in ((lambda x: ours(x)[0], ours.mixer_norm), (lambda x: theirs(x, src_mask=causal, is_causal=True), theirs.norm1)):
        x = torch.randn(3, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = call(x)
        runs.append([y, *torch.autograd.grad(y.pow(3).sum(), [x, norm.weight])])
    assert all(distance(a, b) < 1e-12 for a, b in zip(*runs, strict=True))


def test_a_preset_has_it():
    config = LMConfig.preset("transformer", dim=32, layers=2)
    assert config.block == "post" and config.norm == "layer" and config.ffn_options == {"mlp": {"activation": "relu"}}
    assert config.options_of(0) == {"bias": True, "out_bias": True}
