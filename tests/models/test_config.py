"""Patterns fill layers, and what no model can be made of is refused before anything is built."""

import pytest

from linattn.models import LanguageModel, LMConfig, pattern


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
        ({"mixer": "gla*0"}, "counts from 1"),
        ({"mixer": ["gla"]}, "must be a pattern"),
        ({"ffn": "swigle"}, "no feed-forward is called 'swigle'"),
        ({"norm": "batch"}, "norm must be one of 'rms', 'layer', but came as 'batch'"),
        ({"block": "both"}, "block must be one of 'pre', 'post'"),
        ({"layers": 0}, "layers must be an integer of at least 1, but came as 0"),
        ({"dim": 3.5}, "dim must be an integer"),
        ({"vocab_size": True}, "vocab_size must be an integer"),
        ({"ffn_dim": 0}, "ffn_dim must be an integer"),
        ({"mixer_options": {"softmax": {}}}, "mixer_options speaks of 'softmax', but the mixers are gla"),
        ({"mixer_options": {"gla": {"head": 2}}}, "gla has no option 'head'. There are: heads"),
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
