"""Llama and its relatives: shards, rotary frequencies, refusals, and text in pieces; logits and export are in test_load."""

import re

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import linattn
from linattn.hf.load import config_of, export, load
from linattn.mixers.rotary import frequencies, gain
from tests.hf.llama_models import LINEAR, LLAMA3, MODELS, YARN
from tests.hf.theirs import distance, theirs_of

LONG = {"original_max_position_embeddings": 8192, "factor": 32.0, "rope_theta": 500000.0}


def test_shards(tmp_path):
    theirs = theirs_of("llama", **MODELS["llama"][0])
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    ids = torch.randint(3, 60, (2, 45))
    with torch.no_grad():
        assert distance(load(tmp_path / "theirs")(ids).logits, theirs(ids).logits) < 1e-5


@pytest.mark.parametrize("model_type", MODELS)
def test_pieces_with_a_cache_are_the_whole(model_type, tmp_path):
    """In float64, where pieces differ only by rounding; sequences exceed the window of 9 tokens within and between pieces."""
    theirs_of(model_type, **MODELS[model_type][0]).save_pretrained(tmp_path / "theirs")
    ours, ids = load(tmp_path / "theirs", dtype=torch.float64), torch.randint(3, 60, (2, 45))
    with torch.no_grad():
        whole, cache, found = ours(ids).logits, None, []
        for piece in ids.split([11, 1, 1, 20, 12], 1):
            out = ours(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    assert distance(torch.cat(found, 1), whole) < 1e-10


@pytest.mark.parametrize("rope", [LLAMA3, LLAMA3 | LONG, LINEAR, YARN, YARN | LONG, YARN | LONG | {"mscale": 0.7, "mscale_all_dim": 1.1}])
def test_rotary_frequencies_are_those_of_transformers(rope):
    how = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    content = how | {"intermediate_size": 8, "rope_parameters": rope, "max_position_embeddings": 2**18}
    softmax = linattn.LanguageModel(config_of(content)).model.layers[0].mixer
    theirs = transformers.LlamaConfig(**content)
    wanted, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
    found = frequencies(torch.empty(0, dtype=torch.float64), softmax.rotated, softmax.base, softmax.scaling)
    assert found.dtype == torch.float64 and len(found) == 64
    torch.testing.assert_close(found.float(), wanted, rtol=1e-5, atol=0)
    assert gain(softmax.scaling) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama", "mlp_bias": True}, "llama: mlp_bias must be False to be read, but is True"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "llama: hidden_act must be 'silu' to be read, but is 'gelu'"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "llama: rope_type must be 'default' or 'linear' or 'llama3' or 'yarn'",
        ),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "with partial_rotary_factor 1"),
        ({"model_type": "qwen2", "rope_parameters": YARN | {"truncate": False}}, "and truncate true"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, "but has 'chunked_attention'"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "sliding_window must be a number"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None to be read, but is 50.0"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention must be False or None"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
    ],
)
def test_what_is_not_read(config, reason):
    sizes = {"vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=re.escape(reason)):
        config_of(sizes | config)


@pytest.mark.parametrize(
    ("config", "to", "reason"),
    [
        ({"mixer": "softmax, gla"}, "llama", "it has gla layers, but all must be softmax"),
        ({"mixer": "softmax", "mixer_options": {"softmax": {"window": 5}}}, "llama", "mixer.window is 5, but would be None"),
        ({"mixer": "softmax", "mixer_options": {"softmax": {"bias": True}}}, "mistral", "q_proj"),
        ({"mixer": "softmax", "layer_options": [{"window": 5}, {}]}, "mistral", "layers.1.mixer.window is None, but would be 5"),
        ({"mixer": "softmax", "layer_options": [{"window": 5}, {"window": 6}]}, "qwen3", "windows of 5, 6 tokens"),
        ({"mixer": "softmax", "layer_options": [{"base": 10.0, "window": 5}, {}]}, "qwen2", "mixer.base is"),
        ({"mixer": "softmax", "mixer_options": {"softmax": {"rotated": 4}}}, "llama", "it rotates 4 of the 16 channels of a head"),
        ({"mixer": "softmax", "mixer_options": {"softmax": {"scale": 0.5}}}, "llama", "mixer.scale is 0.5, but would be None"),
        ({"mixer": "softmax", "mixer_options": {"softmax": {"norm_eps": 1e-5}}}, "qwen3", "q_norm is ZeroCenteredRMSNorm"),
        ({"mixer": "softmax"}, "gemma3_text", "it has no geglu feed-forwards"),
        ({"mixer": "softmax", "block": "sandwich"}, "llama", "mixer_post_norm is RMSNorm, but would be nothing"),
        ({"mixer": "softmax", "embedding_scale": 2.0}, "llama", "scale is 2.0, but would be 1.0"),
    ],
)
def test_what_a_target_cannot_express(config, to, reason, tmp_path):
    model = linattn.LanguageModel(linattn.LMConfig(**{"vocab_size": 20, "dim": 64, "layers": 2, **config}))
    with pytest.raises(ValueError, match=f"^{to} cannot express this model: ") as error:
        export(model, to, tmp_path / "out")
    assert reason in str(error.value)


def test_a_model_of_our_own_goes_out_as_llama(tmp_path):
    torch.manual_seed(0)
    options = {"heads": 4, "kv_heads": 2}
    config = linattn.LMConfig(vocab_size=60, dim=64, layers=2, mixer="softmax", mixer_options={"softmax": options})
    ours, ids = linattn.LanguageModel(config).eval(), torch.randint(60, (2, 30))
    export(ours, "llama", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs) is transformers.LlamaForCausalLM
    with torch.no_grad():
        assert distance(theirs(ids).logits, ours(ids)) < 1e-5
        torch.testing.assert_close(load(tmp_path / "out")(ids).logits, ours(ids))


def test_the_length_that_a_config_names_goes_there_and_back(tmp_path):
    theirs_of("llama", **MODELS["llama"][1]).save_pretrained(tmp_path / "theirs")
    load(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    export(load(tmp_path / "ours"), "llama", tmp_path / "back")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").max_position_embeddings == 256
