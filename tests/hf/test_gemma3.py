"""The text part of a Gemma 3 that reads images, against transformers' class on text."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import linattn
from tests.hf.llama_models import MODELS
from tests.hf.theirs import distance

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    text = {"vocab_size": 97, "hidden_size": 32, **MODELS["gemma3_text"][0]}
    config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize("names", ["as saved", "published", "modules"])
def test_text_part(theirs, names, tmp_path):
    theirs.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if names == "published":  # google/gemma-3-4b-it
        weights = {
            f"language_model.model.{n.split('language_model.')[1].removeprefix('model.')}" if "language_model" in n else n: t
            for n, t in weights.items()
        }
        weights = {n.removeprefix("model.") if "language_model" not in n else n: t for n, t in weights.items()}
    if names == "modules":
        weights = {n: t for n, t in theirs.state_dict().items() if n != "lm_head.weight"}
        assert "model.language_model.embed_tokens.weight" in weights
    assert any("vision_tower" in name for name in weights)
    save_file({n: t.contiguous() for n, t in weights.items()}, tmp_path / "model.safetensors")
    ours, ids = linattn.load(tmp_path), torch.randint(0, 97, (2, 40))
    with torch.no_grad():
        assert distance(ours(ids).logits, theirs(ids).logits) < 1e-5
    assert ours.config.tie_embeddings
    linattn.hf.export(ours, "gemma3_text", tmp_path / "text")
    again = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path / "text").eval()
    with torch.no_grad():
        assert distance(again(ids).logits, theirs(ids).logits) < 1e-5
    with pytest.raises(ValueError, match="gemma3 cannot express this model: gemma3 also reads images; gemma3_text is its text part"):
        linattn.hf.export(ours, "gemma3", tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "gemma3: text_config must be the config of the text part, but is None"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "config.json says num_hidden_layers = 1000000000, but there are"),
        ({"text_config": {"attn_logit_softcapping": 3.0}}, "attn_logit_softcapping must be None to be read, but is 3.0"),
    ],
)
def test_configs_that_are_refused(theirs, change, message, tmp_path):
    theirs.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    text = change["text_config"]
    content["text_config"] = text if text is None else content["text_config"] | text
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        linattn.load(tmp_path)
