"""Perceiver and Perceiver IO against transformers' encoder and decoder with the same weights."""

import pytest
import torch

from linattn.mixers import create
from tests.oracles.compare import assert_graded, distance

pytest.importorskip("transformers")


def config(**options):
    from transformers import PerceiverConfig

    return PerceiverConfig(
        num_latents=5, d_latents=32, d_model=32, num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=2,
        self_attention_widening_factor=3, cross_attention_widening_factor=3, attention_probs_dropout_prob=0.0, **options,
    )  # fmt: skip


OPTIONS = {"latents": 5, "layers": 2, "heads": 4, "cross_heads": 2, "widening": 3}


def lend(ours, theirs):
    """Copy their modules into our layer."""
    attention = theirs.attention.self
    pairs = {
        "norm_q": attention.layernorm1, "q_proj": attention.query, "k_proj": attention.key, "v_proj": attention.value,
        "o_proj": theirs.attention.output.dense, "norm": theirs.layernorm, "dense1": theirs.mlp.dense1, "dense2": theirs.mlp.dense2,
    }  # fmt: skip
    for name, module in pairs.items():
        setattr(ours, name, module)
    if ours.norm_kv is not None:
        ours.norm_kv = attention.layernorm2


def encoders(mixer, blocks):
    """Their encoder with weights away from 0 and 1, copied to ours."""
    from transformers.models.perceiver.modeling_perceiver import PerceiverEncoder

    theirs = shaken(PerceiverEncoder(config(num_blocks=blocks), kv_dim=32))
    lend(mixer.encoder.cross, theirs.cross_attention)
    for own, layer in zip(mixer.encoder.layers, theirs.self_attends, strict=True):
        lend(own, layer)
    return theirs


def shaken(module):
    with torch.no_grad():
        for p in module.double().parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


@pytest.mark.parametrize("length", [1, 9])
def test_transformers(length):
    ours = create("perceiver", dim=32, **OPTIONS).double()
    theirs, latents = encoders(ours, 1), ours.encoder.latents
    x = torch.randn(2, length, 32, dtype=torch.float64)

    def encoded(x):
        return theirs(latents.expand(2, -1, -1), inputs=x).last_hidden_state

    assert_graded(lambda x: ours(x)[0], encoded, x, [latents, *theirs.parameters()])


def test_blocks_look_again():
    """Three blocks share the layers of one; the second and third attend to the input with the same weights."""
    ours = create("perceiver", dim=32, blocks=3, **OPTIONS).double()
    theirs, other = encoders(ours, 1), encoders(create("perceiver", dim=32, **OPTIONS), 1).cross_attention
    lend(ours.encoder.again, other)
    x = torch.randn(2, 9, 32, dtype=torch.float64)

    def encoded(x):
        z = ours.encoder.latents.expand(2, -1, -1)
        for cross in (theirs.cross_attention, other, other):
            z = cross(z, inputs=x)[0]
            for layer in theirs.self_attends:
                z = layer(z)[0]
        return z

    assert_graded(lambda x: ours(x)[0], encoded, x, [ours.encoder.latents, *theirs.parameters(), *other.parameters()])


@pytest.mark.parametrize("residual", [True, False])
def test_transformers_io(residual):
    """With outputs; later blocks do not attend to the input."""
    from transformers.models.perceiver.modeling_perceiver import PerceiverBasicDecoder

    ours = create("perceiver_io", dim=32, blocks=2, residual=residual, **OPTIONS).double()
    theirs, latents = encoders(ours, 2), ours.encoder.latents
    decoder = PerceiverBasicDecoder(
        config(), 32, position_encoding_type="none", num_channels=32, num_heads=2, widening_factor=3, use_query_residual=residual,
        final_project=False,
    )  # fmt: skip
    lend(ours.decoder, shaken(decoder).decoding_cross_attention)
    x, context = (torch.randn(2, n, 32, dtype=torch.float64) for n in (4, 9))

    def decoded(x, context):
        return decoder(x, theirs(latents.expand(2, -1, -1), inputs=context).last_hidden_state).logits

    weights = [latents, *theirs.parameters(), *decoder.parameters()]
    assert_graded(lambda x: ours(x, context), lambda x: decoded(x, context), x, weights)
    assert_graded(lambda context: ours(x, context), lambda context: decoded(x, context), context, weights)


def test_the_state_does_not_grow():
    ours = create("perceiver_io", dim=32)
    states = [ours(torch.randn(1, 2, 32), torch.randn(1, n, 32), return_state=True)[1] for n in (3, 300)]
    assert states[0]["latents"].shape == states[1]["latents"].shape == (1, 64, 32)


def test_positions_are_the_tokens_own():
    ours = create("perceiver_io", dim=32).double()
    x, context = torch.randn(1, 3, 32, dtype=torch.float64), torch.randn(1, 9, 32, dtype=torch.float64)
    assert distance(ours(x, context.flip(1)), ours(x, context)) < 1e-12


def test_refusals():
    with pytest.raises(ValueError, match="latents must be at least 1, but came as 0"):
        create("perceiver", dim=32, latents=0)
    with pytest.raises(ValueError, match="dim must be a positive multiple of its heads, but came as 32 with 5"):
        create("perceiver_io", dim=32, cross_heads=5)
