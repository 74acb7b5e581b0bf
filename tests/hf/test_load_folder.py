"""Model folders: reading and refusals."""

import json
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import linattn
from linattn.hf.load import config_of, export, load
from tests.hf.theirs import distance, theirs_of


def change(folder, **weights):
    """Replace weights, or remove those that are None."""
    all_weights = load_file(folder / "model.safetensors") | weights
    save_file({n: t for n, t in all_weights.items() if t is not None}, folder / "model.safetensors")


def configure(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_weights_that_do_not_fit_are_all_named(folder):
    change(folder, **{
        "backbone.layers.0.mixer.D": None, "backbone.norm_f.weight": None, "backbone.extra": torch.ones(2),
        "backbone.layers.0.mixer.A_log": torch.ones(3, 4),
    })  # fmt: skip
    with pytest.raises(ValueError, match="the weights do not fit the config") as error:
        load(folder)
    for part in (
        "Missing: backbone.norm_f.weight, backbone.layers.0.mixer.D.", "Not expected: backbone.extra",
        "Of another shape: backbone.layers.0.mixer.A_log [3, 4] where [64, 16] was wanted",
    ):  # fmt: skip
        assert part in str(error.value)


def test_all_weights_of_a_lost_layer_are_named(tmp_path):
    theirs_of("rwkv", num_hidden_layers=2).save_pretrained(tmp_path)
    lost = [name for name in load_file(tmp_path / "model.safetensors") if name.startswith("rwkv.blocks.1.")]
    change(tmp_path, **dict.fromkeys(lost))
    with pytest.raises(ValueError, match="Missing: ") as error:
        load(tmp_path)
    assert len(lost) > 15
    assert all(name in str(error.value) for name in lost)


def test_tied_heads_may_be_there_but_not_differ(folder):
    embedding = load_file(folder / "model.safetensors")["backbone.embeddings.weight"]
    change(folder, **{"lm_head.weight": embedding.clone()})
    model = load(folder)
    assert model.lm_head.weight is model.model.embedding.weight
    change(folder, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match="the config ties lm_head.weight to backbone.embeddings.weight, but"):
        load(folder)


def test_files_cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is damaged, truncated or not a safetensors file"):
        load(folder)
    (folder / "config.json").write_text('{"model_type": "mam')
    with pytest.raises(ValueError, match=r"config.json is damaged"):
        load(folder)


def test_pickles_are_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor model.safetensors.index.json"):
        load(folder)
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / name).write_bytes(pickle.dumps({}))
        with pytest.raises(ValueError, match=f"{name}: a pickle can run code|{name} is a pickle"):
            load(folder)
        with pytest.raises(ValueError, match="is a pickle"):
            load(folder / name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(ValueError, match="is not a safetensors file"):
            load(folder)
        (folder / "model.safetensors.index.json").unlink()
        (folder / name).unlink()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", "a\\b.safetensors"])
def test_names_out_of_the_folder(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"backbone.norm_f.weight": name}}))
    with pytest.raises(ValueError, match="which is outside of it"):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json"])
def test_links_out_of_the_folder(folder, name):
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)
    with pytest.raises(ValueError, match="is a link out of its folder"):
        load(folder)


def test_sharded_files(tmp_path):
    theirs = theirs_of("mamba", num_hidden_layers=2, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 2
    ids = torch.randint(60, (1, 9))
    with torch.no_grad():
        assert distance(load(tmp_path / "theirs")(ids).logits, theirs(ids).logits) < 1e-5
    index = json.loads((tmp_path / "theirs/model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = next(f for f in index["weight_map"].values() if f != index["weight_map"]["lm_head.weight"])
    (tmp_path / "theirs/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lacks weights that model.safetensors.index.json lists: lm_head.weight"):
        load(tmp_path / "theirs")


@pytest.mark.parametrize("sharded", [False, True])
def test_variants(folder, sharded):
    """Names as transformers makes them: model.fp16.safetensors, model.safetensors.index.fp16.json."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).half()
    model.save_pretrained(folder, variant="fp16", max_shard_size=10_000 if sharded else "5GB")
    assert ("model.safetensors.index.fp16.json" if sharded else "model.fp16.safetensors") in {p.name for p in folder.iterdir()}
    half = linattn.load(folder, variant="fp16")
    assert half.dtype == torch.float16 and load(folder).dtype == torch.float32
    assert torch.equal(half.model.embedding.weight, model.get_input_embeddings().weight)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor model.safetensors.index.json.* variants fp16: name one"):
        load(folder)
    with pytest.raises(FileNotFoundError, match=r"neither model.bf16.safetensors nor model.safetensors.index.bf16.json"):
        load(folder, variant="bf16")
    for wrong in ("", "../fp16", "a/b", 16, "a\\b"):
        with pytest.raises(ValueError, match="variant must be a word in the names of files, such as 'fp16', but came as"):
            load(folder, variant=wrong)
    with pytest.raises(ValueError, match="variant must be None with a config"):
        load(linattn.LMConfig(vocab_size=8, dim=32, layers=1), variant="fp16")


def test_configs_that_cannot_be_said(folder):
    for values, message in (
        ({"model_type": "bloom"}, "no family of models is called 'bloom'; the choices are"),
        ({"model_type": None}, "has no model_type"),
        ({"use_bias": True}, "mamba: use_bias must be False to be read, but is True"),
        ({"intermediate_size": 50}, "intermediate_size 50 must be a multiple of hidden_size"),
        ({"num_hidden_layers": 10**12}, "says num_hidden_layers = 1000000000000, but there are 12 weights"),
        ({"vocab_size": 10**18}, "config.json asks for tensors that cannot exist"),
        ({"quantization_config": {}}, "quantised"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"state_size": None}, "state_size"),
        ({"conv_kernel": 0}, "conv_width must be an integer of at least 1, but came as 0"),
    ):
        before = (folder / "config.json").read_text()
        configure(folder, **values)
        with pytest.raises(ValueError, match=message):
            load(folder)
        (folder / "config.json").write_text(before)
    change(folder, **{"backbone.norm_f.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(ValueError, match="backbone.norm_f.weight has dtype I8"):
        load(folder)
    with pytest.raises(FileNotFoundError, match="does not exist; give the folder of a run"):
        load(folder / "no")
    with pytest.raises(FileNotFoundError, match="organisation/model does not exist; .*hf download organisation/model --local-dir"):
        load("organisation/model")
    with pytest.raises(FileNotFoundError, match="is a file: give the folder"):
        load(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("model_type", "name", "options"),
    [
        ("kimi_linear", "n_shared_experts", {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}),
        ("qwen3_next", "shared_expert_intermediate_size", {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}),
    ],
)
def test_experts_without_a_shared_one(model_type, name, options):
    with pytest.raises(ValueError, match=f"^{model_type}: {name} must be at least 1 to be read, but is 0"):
        config_of({"model_type": model_type, name: 0, **options})


@pytest.mark.parametrize(
    ("model_type", "dense"), [("kimi_linear", {"mlp_layer_types": ["dense"] * 2}), ("qwen3_next", {"mlp_only_layers": [0, 1]})]
)
def test_experts_that_no_layer_has(model_type, dense, tmp_path):
    """The config still counts them: 256 and 512 by default, more than the weights."""
    sizes = dict.fromkeys(("intermediate_size", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4)
    theirs = theirs_of(model_type, num_hidden_layers=2, layer_types=["linear_attention"] * 2, **sizes, **heads, **dense)
    theirs.save_pretrained(tmp_path / "theirs")
    model, ids = load(tmp_path / "theirs"), torch.randint(60, (1, 9))
    with torch.no_grad():
        assert distance(model(ids).logits, theirs(ids, use_cache=False).logits) < 1e-5
    export(model, model_type, tmp_path / "back")
    assert torch.equal(load(tmp_path / "back").lm_head.weight, model.lm_head.weight)


def test_more_experts_than_weights(tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 8}
    theirs = theirs_of("minimax", num_hidden_layers=1, **sizes)
    theirs.save_pretrained(tmp_path / "theirs")
    configure(tmp_path / "theirs", num_local_experts=10**12)
    with pytest.raises(ValueError, match="counts 1000000000000 experts in a layer, but there are 16 weights"):
        load(tmp_path / "theirs")


def test_weights_wider_than_the_embedding_keep_their_digits(folder):
    """In a bfloat16 checkpoint whose D is float32, as in published ones."""
    wide = {n: t if n.endswith(".D") else t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    change(folder, **wide)
    name = "model.layers.0.mixer.D"
    assert torch.equal(load(folder, dtype=torch.float32).state_dict()[name], wide["backbone.layers.0.mixer.D"])
    assert load(folder).state_dict()[name].dtype == torch.bfloat16


def test_small_shares_of_the_token_before_keep_their_digits(tmp_path):
    """RWKV-7's μ in bfloat16, stored as 1 − μ in our channel mixing."""
    sizes = {"hidden_size": 32, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 60}
    ranks = dict.fromkeys(("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"), 4)
    export(load({"model_type": "rwkv7", **sizes, **ranks}), "rwkv7", tmp_path / "theirs")
    name, mu = "model.layers.0.ffn.x_k", torch.linspace(0, 0.01, 32).bfloat16()
    change(tmp_path / "theirs", **{name: mu})
    model = load(tmp_path / "theirs")
    torch.testing.assert_close(1 - model.model.layers[1].mixer.time_mix_key, mu.float(), rtol=1e-4, atol=1e-7)
    export(model.bfloat16(), "rwkv7", tmp_path / "back")
    assert torch.equal(load(tmp_path / "back").model.layers[1].mixer.time_mix_key, model.model.layers[1].mixer.time_mix_key)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_what_a_class_without_a_head_has_saved(model_type, tmp_path):
    """Its names lack the first part, and a tied head has no weight. Older ones have "embedding" for "embeddings"."""
    sizes = {"num_hidden_layers": 1, "state_size": 8}
    theirs = theirs_of(
        model_type, **sizes, tie_word_embeddings=True, **({"num_heads": 4, "head_dim": 16, "n_groups": 1} if model_type == "mamba2" else {})
    )
    theirs.backbone.save_pretrained(tmp_path)
    ids = torch.randint(60, (1, 9))
    with torch.no_grad():
        assert distance(load(tmp_path)(ids).logits, theirs(ids).logits) < 1e-5
    change(tmp_path, **{"embeddings.weight": None, "embedding.weight": theirs.backbone.embeddings.weight.detach().clone()})
    with pytest.raises(ValueError, match="Not expected: embedding.weight, layers.0"):
        load(tmp_path)
    change(tmp_path, **{f"backbone.{n}": t for n, t in load_file(tmp_path / "model.safetensors").items()})
    change(tmp_path, **{n: None for n in load_file(tmp_path / "model.safetensors") if not n.startswith("backbone.")})
    with torch.no_grad():
        assert distance(load(tmp_path)(ids).logits, theirs(ids).logits) < 1e-5
    configure(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="Missing: lm_head.weight$"):
        load(tmp_path)


def test_angles_of_old_checkpoints_are_passed_over(tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 64, "num_hidden_layers": 3}
    theirs_of("recurrent_gemma", **sizes).save_pretrained(tmp_path)
    change(tmp_path, **{"model.layers.2.temporal_block.rotary_emb.inv_freq": torch.ones(2)})
    assert load(tmp_path).config.layers == 3


def test_the_depth_of_xlstm_has_two_names(tmp_path):
    """Its class uses ``num_blocks``."""
    ids = torch.randint(60, (1, 9))
    for blocks in (1, 2):  # one has fewer weights than the other name counts
        theirs = theirs_of("xlstm", hidden_size=128, num_heads=2, num_blocks=blocks)
        assert theirs.config.num_hidden_layers == 32
        theirs.save_pretrained(tmp_path)
        with torch.no_grad():
            assert distance(load(tmp_path)(ids).logits, theirs(ids, use_cache=False).logits) < 1e-5
    configure(tmp_path, num_blocks=10**12)
    with pytest.raises(ValueError, match="says num_blocks = 1000000000000"):
        load(tmp_path)
    with pytest.raises(ValueError, match="embedding_dim must be 4096 to be read, but is 128"):
        load({"model_type": "xlstm", "embedding_dim": 128})


def test_kernels_of_another_gate_are_refused():
    with pytest.raises(
        ValueError, match="chunkwise_kernel must be one with exponential input gates to be read, but is 'chunkwise--triton_xl_c"
    ):
        config_of({"model_type": "xlstm", "chunkwise_kernel": "chunkwise--triton_xl_chunk_siging"})


def test_other_packages_may_have_registered_configs_of_their_own(folder, monkeypatch):
    """As an import of fla does for Mamba."""

    class Config(transformers.PreTrainedConfig):
        model_type = "mamba"

    monkeypatch.setitem(transformers.CONFIG_MAPPING._extra_content, "mamba", Config)
    assert transformers.CONFIG_MAPPING["mamba"] is Config
    assert load(folder).config.layers == 1
    export(load(folder), "mamba", folder.parent / "back")
    assert "state_size" in json.loads((folder.parent / "back/config.json").read_text())


def test_configs_that_cannot_be_understood():
    for content in ({"model_type": "mamba2", "expand": 1.5}, {"model_type": "gla", "hidden_size": "wide"}):
        with pytest.raises(ValueError, match="the config is invalid"):
            load(content)


@pytest.mark.parametrize(("model_type", "name"), [("gla", "num_kv_heads"), ("retnet", "num_kv_heads"), ("kda", "num_v_heads")])
def test_as_many_heads_as_of_queries(model_type, name):
    sizes = {"model_type": model_type, "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 9, "num_heads": 2}
    assert config_of({**sizes, name: 2}).to_dict() == config_of(sizes).to_dict()
    with pytest.raises(ValueError, match=f"{name} must be None or 2 to be read, but is 1"):
        config_of({**sizes, name: 1})


def test_what_the_folder_says_of_generation(folder):
    """End tokens and sampling, compared with their class, and exported again."""
    theirs, ids = transformers.AutoModelForCausalLM.from_pretrained(folder), torch.randint(3, 60, (1, 9))
    plain = theirs.generate(ids, max_new_tokens=20)
    ends = [int(plain[0, 14]), 7]
    for wanted in ({"repetition_penalty": 3.0, "no_repeat_ngram_size": 2, "eos_token_id": 59}, {"eos_token_id": ends}):
        (folder / "generation_config.json").write_text(json.dumps(wanted))
        theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(folder), load(folder)
        tokens = theirs.generate(ids, max_new_tokens=20)
        assert tokens.shape != plain.shape or not torch.equal(tokens, plain)
        assert torch.equal(ours.generate(ids, max_new_tokens=20), tokens)
    export(ours, "mamba", folder.parent / "back")
    assert torch.equal(transformers.AutoModelForCausalLM.from_pretrained(folder.parent / "back").generate(ids, max_new_tokens=20), tokens)
    ours.save_pretrained(folder.parent / "ours")
    assert torch.equal(load(folder.parent / "ours").generate(ids, max_new_tokens=20), tokens)
    for wrong, message in (
        ("[", "is damaged"),
        ('{"max_new_tokens": -3}', "is invalid: .max_new_tokens. must be greater than 0"),
        ('{"watermarking_config": 5}', "is invalid"),
    ):
        (folder / "generation_config.json").write_text(wrong)
        with pytest.raises(ValueError, match=f"generation_config.json {message}"):
            load(folder)


def test_quantised_as_nothing(folder):
    """As written by tools that fill in every field."""
    configure(folder, quantization_config=None)
    assert load(folder).dtype == torch.float32


def test_dtypes_and_devices(folder):
    model = load(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].mixer.A_log.dtype == torch.float32
    model.save_pretrained(folder.parent / "ours")
    again = load(folder.parent / "ours")
    assert again.dtype == torch.bfloat16
    for name, t in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], t), name
    assert load(folder.parent / "ours", dtype=torch.float64).model.norm.weight.dtype == torch.float64
    with pytest.raises(TypeError, match="dtype must be a floating torch.dtype"):
        load(folder, dtype="bfloat16")


@pytest.mark.parametrize("device", ["gpu", 3.5])
def test_devices_that_are_none(folder, device):
    with pytest.raises(ValueError, match=f"device must be a torch.device or the name of one.* but came as {device!r}"):
        load(folder, device=device)


def test_a_config_alone_gives_a_new_model():
    config = transformers.Mamba2Config(hidden_size=32, num_heads=4, head_dim=16, num_hidden_layers=1, vocab_size=60, n_groups=2)
    for given in (config, config.to_dict(), linattn.models.LMConfig(vocab_size=60, dim=32, layers=1, mixer="mamba2")):
        model = linattn.load(given)
        assert not model.training
        assert model(torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 60)
