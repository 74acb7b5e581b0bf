"""Patterns fill layers, and invalid configs are refused before anything is built."""

import pytest
import torch

from linattn.mixers.attention.softmax import Softmax
from linattn.models import LanguageModel, LMConfig, pattern
from linattn.models.config import PRESETS


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gla", ["gla"]),
        ("gla*3, softmax", ["gla", "gla", "gla", "softmax"]),
        (" gla * 2 ,softmax*1,gla ", ["gla", "gla", "softmax", "gla"]),
    ],
)
def test_patterns(text, names):
    assert pattern.parse(text, "mixer") == names


@pytest.mark.parametrize("text", ["", " ", "gla*", "*3", "gla**2", "gla,,softmax", "gla,", "gla*-1", "gla*1.5", "gla softmax", "gla*0"])
def test_bad_patterns_are_named(text):
    with pytest.raises(ValueError, match=r"^mixer "):
        pattern.parse(text, "mixer")


def test_patterns_repeat_until_the_layers_are_filled():
    config = LMConfig(layers=6, dim=32, mixer="gla*3, softmax", ffn="swiglu, none")
    assert config.mixer_names == ["gla", "gla", "gla", "softmax", "gla", "gla"]
    assert config.ffn_names == ["swiglu", "none"] * 3
    blocks = LanguageModel(config).model.layers
    assert [type(b.mixer).info.name for b in blocks] == config.mixer_names
    assert [b.ffn is not None for b in blocks] == [True, False] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mixer": "glaa"}, "no mixer is called 'glaa'; did you mean 'gla'"),
        ({"mixer": "gla*0"}, "counts of at least 1"),
        ({"mixer": ["gla"]}, "must be a pattern"),
        ({"ffn": "swigle"}, "no feed-forward is called 'swigle'"),
        ({"norm": "batch"}, "norm must be one of 'rms', 'zero_centered_rms', 'layer', but came as 'batch'"),
        ({"block": "both"}, "block must be one of 'pre', 'post', 'normed'"),
        ({"block": torch.ones(3)}, "'reversible', but came as a tensor of torch.float32 [3]"),
        ({"norm_eps": 0}, "norm_eps must be a number above 0, but came as 0"),
        ({"logit_soft_cap": -1.0}, "logit_soft_cap must be a number above 0"),
        ({"embedding_scale": True}, "embedding_scale must be a number above 0"),
        ({"residual_scales": {"softmax": [1, 2]}}, "residual_scales names 'softmax', but the model has gla, swiglu"),
        ({"residual_scales": {"gla": 2}}, "must be two numbers [a, b], but came as 2"),
        ({"ffn_options": {"experts": {}}}, "ffn_options names 'experts', but the feed-forwards are swiglu"),
        ({"ffn": "none", "ffn_options": {"none": {}}}, "ffn_options names 'none'"),
        ({"ffn_options": {"swiglu": {"width": 3}}}, "swiglu has no option 'width'; the choices are: hidden"),
        ({"ffn_options": 3}, "ffn_options must be a dict"),
        ({"layer_options": [{}]}, "layer_options must be a list of 4 dicts"),
        ({"layer_options": [{}, {}, {}, {"head": 2}]}, "layer_options[3]: gla has no option 'head'"),
        ({"layers": 0}, "layers must be an integer of at least 1, but came as 0"),
        ({"dim": 3.5}, "dim must be an integer"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"ffn_dim": 0}, "ffn_dim must be an integer"),
        ({"mixer_options": {"softmax": {}}}, "mixer_options names 'softmax', but the mixers are gla"),
        ({"mixer_options": {"gla": {"head": 2}}}, "gla has no option 'head'; did you mean 'heads'?"),
        ({"mixer_options": {"gla": {"dim": 2}}}, "gla has no option 'dim'"),
        ({"mixer": "taylor", "mixer_options": {"taylor": {"causal": False}}}, "needs causal mixers, but causal is False"),
        ({"mixer_options": {"gla": 4}}, "must be a dict of options"),
        ({"mixer_options": 4}, "mixer_options must be a dict"),
    ],
)
def test_what_no_model_can_be_made_of(wrong, message):
    with pytest.raises((ValueError, TypeError)) as error:
        LMConfig(**{"mixer": "gla", **wrong})
    assert message in str(error.value)


def test_unknown_fields_are_errors():
    with pytest.raises(TypeError, match="hidden"):
        LMConfig(hidden=3)


def test_mixer_options_reach_the_mixers():
    config = LMConfig(dim=32, layers=2, mixer="gla, softmax", mixer_options={"gla": {"heads": 2}, "softmax": {"heads": 8}})
    gla, softmax = (block.mixer for block in LanguageModel(config).model.layers)
    assert (gla.heads, softmax.heads) == (2, 8)


def test_the_preset_of_based():
    """Layers 1, 6, 11, ... of the authors' models are linear, 2, 7, 12, ... have a window, the others are convolutions."""
    config = LMConfig.preset("based", dim=32, layers=25)
    assert [i for i, name in enumerate(config.mixer_names) if name == "based"] == [1, 6, 11, 16, 21]
    assert [i for i, name in enumerate(config.mixer_names) if name == "softmax"] == [2, 7, 12, 17, 22]
    assert config.mixer_names.count("base_conv") == 15
    assert {m.window for m in LanguageModel(config).modules() if isinstance(m, Softmax)} == {64}


def test_presets_take_fields_and_options():
    config = LMConfig.preset("based", dim=32, layers=5, norm="layer", mixer_options={"based": {"heads": 2}, "softmax": {"heads": 8}})
    assert config.norm == "layer"
    assert config.mixer_options == {"softmax": {"window": 64, "heads": 8}, "based": {"heads": 2}}
    wide = LMConfig.preset("based", dim=32, layers=5, mixer_options={"softmax": {"window": 128}})
    assert wide.mixer_options["softmax"]["window"] == 128 and LMConfig.preset("based").mixer_options["softmax"]["window"] == 64
    with pytest.raises(ValueError, match="no preset is called 'base'; there are based, rwkv7"):
        LMConfig.preset("base")


def test_the_presets_of_samba_and_yoco():
    samba, yoco = (LMConfig.preset(name, dim=32, layers=5) for name in ("samba", "yoco"))
    assert samba.mixer_names == ["mamba", "softmax", "mamba", "softmax", "mamba"]
    assert {m.window for m in LanguageModel(samba).modules() if isinstance(m, Softmax)} == {2048}
    assert yoco.mixer_names == ["gated_retnet"] * 3 + ["yoco"] * 2
    assert LMConfig.preset("yoco", layers=1).mixer_names == ["gated_retnet"]
    assert LMConfig.preset("yoco").mixer_names == ["gated_retnet"] * 2 + ["yoco"] * 2
    with pytest.raises(ValueError, match="layers must be an integer of at least 1, but came as 0"):
        LMConfig.preset("yoco", layers=0)


def test_yoco_keeps_one_cache():
    lm = LanguageModel(LMConfig.preset("yoco", vocab_size=50, dim=32, layers=6))
    _, state = lm(torch.randint(50, (2, 9)), return_state=True)
    assert [set(layer) for layer in state.layers] == [{"S", "position"}] * 3 + [{"cache", "position"}] + [{"position"}] * 2


@pytest.mark.parametrize("name", PRESETS)
def test_presets_decode_as_they_read(name):
    lm, ids = LanguageModel(LMConfig.preset(name, vocab_size=50, dim=32, layers=6)).double(), torch.randint(50, (2, 80))
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(0.1 * torch.randn_like(p))
        whole, steps, state = lm(ids), [], None
        for piece in ids.split([70, *[1] * 10], 1):
            logits, state = lm(piece, state, return_state=True)
            steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["tie_embeddings", "embedding_norm"])
def test_switches_are_true_or_false(name):
    with pytest.raises(ValueError, match=f"{name} must be True or False, but came as 'no'"):
        LMConfig(**{name: "no"})


def test_residual_scales_are_a_dict():
    with pytest.raises(TypeError, match="residual_scales must be a dict"):
        LMConfig(residual_scales=[1.0])
