"""Models trained with the options suggested by ``export --to`` can be exported."""

import re
import shlex

import pytest

import linattn
from linattn.cli.options import _by_name
from linattn.hf.convert import FAMILIES, family
from linattn.hf.load import their_config
from linattn.hf.remedy import layers_for


def told(**config) -> str:
    """Options after "train with" in the refusal of an export of ``config`` to ``to``."""
    to = config.pop("to")
    with pytest.raises(ValueError, match="cannot express this model") as error:
        their_config(linattn.models.LMConfig(vocab_size=20, dim=64, **config), family(to))
    assert "\n" not in str(error.value)
    return str(error.value).rpartition(f"; for --to {to} train with ")[2]


@pytest.mark.parametrize("name", ["gated_deltanet", "kda", "retnet"])
def test_options_are_named_that_make_it_fit(name):
    words = shlex.split(told(to=name, mixer=name, layers=2))
    options = _by_name("mixer_options", [word for word in words if "=" in word])
    fitting = linattn.models.LMConfig(vocab_size=20, dim=64, layers=2, mixer=name, mixer_options=options)
    assert their_config(fitting, family(name))["model_type"] == name


def test_norms_are_named_that_make_a_hybrid_fit():
    words = shlex.split(told(to="qwen3_next", mixer="gated_deltanet*3, softmax", layers=4))
    options = _by_name("mixer_options", [word for word in words if "=" in word])
    assert options["softmax"] == {"gated": True, "norm_eps": 1e-5} and words[-2:] == ["--norm", "zero_centered_rms"]
    fitting = linattn.models.LMConfig(
        vocab_size=20, dim=64, layers=4, mixer="gated_deltanet*3, softmax", mixer_options=options, norm=words[-1]
    )
    assert their_config(fitting, family("qwen3_next"))["model_type"] == "qwen3_next"


@pytest.mark.parametrize(("name", "layers"), [("mamba", 2), ("mamba2", 2), ("gla", 2), ("llama", 2), ("hgrn2", 2)])
def test_patterns_are_named_that_make_it_fit(name, layers):
    words = dict(re.findall(r'--(\w+) "([^"]+)"', layers_for(family(name))))
    fitting = linattn.models.LMConfig(vocab_size=20, dim=64, layers=layers, **words)
    assert their_config(fitting, family(name))["model_type"] == name


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_family_names_a_pattern(name):
    words = dict(re.findall(r'--(\w+) "([^"]+)"', layers_for(family(name))))
    assert linattn.models.LMConfig(vocab_size=20, dim=64, layers=4, **words).mixer_names
    assert len(layers_for(family(name))) < 100
