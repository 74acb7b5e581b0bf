"""The common base of configs: older config files, and checks."""

import json

import pytest

from linattn.models import ImageConfig, ImageModel, LMConfig, RecommendConfig, RecommendModel, Seq2SeqConfig, Seq2SeqModel, StackConfig

MODELS = {ImageConfig: ImageModel, RecommendConfig: RecommendModel, Seq2SeqConfig: Seq2SeqModel}

# config.json as version 0.1 wrote it, when every config had its own fields
SAVED = {
    ImageConfig: {
        "model_type": "linattn-image", "image_size": [8, 8], "patch_size": 2, "overlap": True, "channels": 1, "classes": 10, "dim": 32,
        "layers": 2, "mixer": "agent, focused", "ffn": "swiglu", "mixer_options": {"agent": {"agents": 4}}, "ffn_dim": 48,
        "ffn_options": {}, "norm": "layer", "norm_eps": 1e-05, "norm_steps": 1000,
    },
    RecommendConfig: {
        "model_type": "linattn-recommend", "items": 9, "length": 12, "dim": 32, "layers": 2, "mixer": "linrec, gla", "causal": True,
        "ffn": "mlp", "mixer_options": {"gla": {"heads": 2}}, "ffn_dim": 48, "ffn_options": {}, "dropout": 0.1,
    },
    Seq2SeqConfig: {
        "model_type": "linattn-seq2seq", "source_vocab": 9, "target_vocab": 8, "length": 12, "dim": 32, "layers": 2,
        "encoder": "gla, softmax", "decoder": "softmax", "cross": "cross_softmax", "ffn": "mlp, none",
        "mixer_options": {"gla": {"heads": 2}}, "ffn_dim": None, "ffn_options": {}, "ratio": 1.0, "spread": True, "dropout": 0.0,
    },
}  # fmt: skip
LANGUAGE = {
    "architectures": ["LinattnForCausalLM"], "block": "pre", "bos_token_id": None, "dim": 32, "dtype": "float32", "embedding_norm": False,
    "embedding_scale": 1.0, "eos_token_id": None, "ffn": "swiglu, none", "ffn_dim": 48, "ffn_options": {},
    "layer_options": [{}, {"window": 4}], "layers": 2, "logit_soft_cap": None, "mixer": "gla, softmax",
    "mixer_options": {"gla": {"heads": 2}}, "model_type": "linattn", "norm": "layer", "norm_eps": 1e-05, "pad_token_id": None,
    "residual_scales": {}, "tie_embeddings": False, "use_cache": True, "vocab_size": 50,
}  # fmt: skip


@pytest.mark.parametrize("kind", SAVED, ids=lambda kind: kind.__name__)
def test_a_config_that_was_saved_before_is_read_and_written(kind, tmp_path):
    """All fields come back with their values; a model saved with it has the same file."""
    model = MODELS[kind](kind(**{k: v for k, v in SAVED[kind].items() if k != "model_type"}))
    model.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == SAVED[kind]
    (tmp_path / "config.json").write_text(json.dumps(SAVED[kind], indent=1) + "\n")
    again = MODELS[kind].load(tmp_path)
    assert again.config == model.config and list(again.state_dict()) == list(model.state_dict())


def test_a_language_model_s_config_that_was_saved_before(tmp_path):
    transformers = pytest.importorskip("transformers")
    import linattn.hf

    (tmp_path / "config.json").write_text(json.dumps(LANGUAGE))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, linattn.hf.LMConfig) and config.options_of(1) == {"window": 4} and config.ffn_names == ["swiglu", "none"]
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written[name] for name in LANGUAGE if name not in ("architectures", "dtype")} == {
        name: value for name, value in LANGUAGE.items() if name not in ("architectures", "dtype")
    }


CONFIGS = {
    LMConfig: {},
    ImageConfig: {},
    RecommendConfig: {"items": 9},
    Seq2SeqConfig: {"source_vocab": 9, "target_vocab": 8},
}


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers must be an integer of at least 1, but came as 0"),
        ({"dim": True}, "dim must be an integer"),
        ({"ffn_dim": 0}, "ffn_dim must be an integer of at least 1, but came as 0"),
        ({"ffn": "mlq"}, "no feed-forward is called 'mlq'"),
        ({"ffn_options": {"switch": {}}}, "ffn_options names 'switch', but the feed-forwards are"),
        ({"ffn": "geglu", "ffn_options": {"geglu": {"wide": 2}}}, "geglu has no option 'wide'"),
        ({"mixer_options": {"lstm": {}}}, "mixer_options names 'lstm', but the mixers are"),
        ({"mixer_options": 3}, "mixer_options must be a dict"),
    ],
)
def test_every_config_checks_what_it_shares(kind, wrong, message):
    assert issubclass(kind, StackConfig)
    with pytest.raises((ValueError, TypeError), match=message):
        kind(**CONFIGS[kind] | wrong)
