"""Configs of served models: architecture, fields that vLLM reads, and refusals by name."""

import pytest

from linattn import mixers
from linattn.hf import LMConfig
from linattn.hf.convert import FAMILIES
from linattn.vllm.config import HEAD_SIZES, HYBRID, STATES, UNKNOWN_TO_VLLM, ServedConfig, filled, served_config

GROWING = sorted(n for n in mixers.available() if mixers.info(n).resumable and not mixers.info(n).recurrent and mixers.info(n).causal)


def content(**options) -> dict:
    return LMConfig(vocab_size=40, **{"dim": 64, "layers": 4, **options}).to_dict()


def test_models_of_states_alone_and_hybrids():
    assert ServedConfig.from_dict(content(mixer="gla")).architectures == [STATES]
    assert ServedConfig.from_dict(content(mixer="mamba, softmax", mixer_options={"softmax": {"window": 4}})).architectures == [STATES]
    config = ServedConfig.from_dict(content(mixer="gla*3, softmax", mixer_options={"softmax": {"heads": 4, "kv_heads": 2}}))
    assert config.architectures == [HYBRID] and config.layers_block_type == ["mamba"] * 3 + ["attention"]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)  # of 16 channels


def test_heads_are_filled_up_to_a_size_that_vllm_has():
    assert [filled(n) for n in (8, 32, 33, 65, 128, 300)] == [32, 32, 64, 80, 128, 512]
    with pytest.raises(ValueError, match=f"at most {HEAD_SIZES[-1]} are supported"):
        filled(600)


@pytest.mark.parametrize("mixer", [n for n in GROWING if n != "softmax"])
def test_other_growing_states_are_refused_by_name(mixer):
    with pytest.raises(ValueError, match=f"vLLM cannot serve this model: .*{mixer}"):
        ServedConfig.from_dict(content(mixer=f"gla, {mixer}", layers=2))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mixer_options": {"softmax": {"conv_width": 4}}}, "short convolution"),
        ({"layer_options": [{"heads": 2}, {"heads": 4}]}, "must have equal heads, but have 2 over 2 of 32 channels and 4 over 4 of 16"),
    ],
)
def test_softmax_layers_that_pages_cannot_hold_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        ServedConfig.from_dict(content(mixer="softmax", layers=2, **options))


@pytest.mark.parametrize("model_type", UNKNOWN_TO_VLLM)
def test_published_families_are_converted(model_type):
    assert model_type in FAMILIES
    given = {"model_type": model_type, "vocab_size": 50, "eos_token_id": 7} | (
        {"expand_k": 1.0, "expand_v": 1.0} if model_type == "rwkv6" else {}
    )
    config = served_config(model_type).from_dict(given)
    assert config.model_type == model_type and config.architectures == [STATES] and config.eos_token_id == 7 and config.vocab_size == 50
