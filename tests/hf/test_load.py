"""Published models become ours with the same logits, and go back with the same weights. Their own classes are the oracle."""

import json
import pickle
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

import linattn
from linattn.cli.main import main
from linattn.hf.convert import family
from linattn.hf.load import config_of, export, load
from linattn.train import checkpoint

SMALL = {"vocab_size": 60, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "mamba": [{"num_hidden_layers": 2, "state_size": 8}, {"num_hidden_layers": 1, "tie_word_embeddings": False, "time_step_rank": 5}],
    "falcon_mamba": [{"num_hidden_layers": 2, "state_size": 8, "tie_word_embeddings": False}],
    "mamba2": [
        {"num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "layer_norm_epsilon": 1e-6},
        {"num_hidden_layers": 1, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 4, "time_step_limit": (0.02, 0.5)},
    ],
    "rwkv": [{"num_hidden_layers": 3, "rescale_every": 2, "intermediate_size": 48}],
    "qwen3_next": [
        {
            "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
            "intermediate_size": 40, "attention_bias": True, "rms_norm_eps": 1e-5,
        },
    ],
    "recurrent_gemma": [
        {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 96, "attention_window_size": 16},
        {
            "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 96, "attention_window_size": 64, "lru_width": 48,
            "head_dim": 20,
            "attention_bias": True, "logits_soft_cap": 5.0, "block_types": ["attention", "recurrent"], "tie_word_embeddings": False,
        },
    ],
    "minimax": [
        {
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 3,
            "intermediate_size": 24, "linear_attn_alpha_factor": 1.5, "mlp_beta_factor": 0.5, "full_attn_alpha_factor": 3,
        },
    ],
    "xlstm": [
        {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "output_logit_soft_cap": 3.0, "ffn_round_up_to_multiple_of": 32},
        {"hidden_size": 128, "num_hidden_layers": 1, "num_heads": 2, "tie_word_embeddings": True},  # which its class does not do
    ],
    "kimi_linear": [
        {
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "intermediate_size": 40, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 10,
            "qk_nope_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 3, "n_shared_experts": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True,
        },
    ],
}  # fmt: skip
CASES = [(name, options) for name, several in MODELS.items() for options in several]


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def theirs_of(model_type, **options):
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # away from ones and zeros, which would hide slips
            p.add_(0.2 * torch.randn_like(p))
    return model


# What published configs say, as far as it is not the default of their class; of very large models one period of their layers.
PUBLISHED = {
    "state-spaces/mamba-130m-hf": {"model_type": "mamba", "num_hidden_layers": 24, "time_step_rank": 48, "intermediate_size": 1536},
    "tiiuae/falcon-mamba-7b": {
        "model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "expand": 16, "num_hidden_layers": 64,
        "time_step_rank": 256, "vocab_size": 65024, "tie_word_embeddings": False,
    },
    "mistralai/Mamba-Codestral-7B-v0.1": {"model_type": "mamba2", "norm_before_gate": True, "rms_norm": True},
    "RWKV/rwkv-4-169m-pile": {"model_type": "rwkv", "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4, "intermediate_size": 5120,
        "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    },
    "google/recurrentgemma-2b": {"model_type": "recurrent_gemma", "num_key_value_heads": 1, "intermediate_size": 15360},
    "MiniMaxAI/MiniMax-Text-01-hf": {
        "model_type": "minimax", "hidden_size": 6144, "intermediate_size": 9216, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 32, "num_hidden_layers": 8, "vocab_size": 200064, "rope_theta": 10000000,
        "layer_types": ["linear_attention"] * 7 + ["full_attention"], "full_attn_alpha_factor": 3.5565588200778455,
        "linear_attn_alpha_factor": 3.5565588200778455, "mlp_alpha_factor": 3.5565588200778455,
    },
    "NX-AI/xLSTM-7b": {"model_type": "xlstm", "embedding_dim": 4096, "num_blocks": 32, "num_heads": 8, "vocab_size": 50304},
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": {
        "model_type": "kimi_linear", "num_hidden_layers": 5, "first_k_dense_replace": 1, "num_experts": 256, "num_experts_per_token": 8,
        "num_shared_experts": 1, "linear_attn_config": {
            "full_attn_layers": [4], "kda_layers": [1, 2, 3, 5], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        },
    },
}  # fmt: skip


def distance(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(("model_type", "options"), CASES)
def test_logits_generation_and_the_way_back(model_type, options, tmp_path):
    theirs = theirs_of(model_type, **options)
    if options.get("n_groups", 1) > 1 and not hasattr(theirs.backbone.layers[0].mixer.norm, "group_size"):
        pytest.skip("this transformers normalises over all groups at once, unlike the paper's code and unlike later versions")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    ids = torch.randint(3, 60, (2, 45))
    with torch.no_grad():
        assert distance(ours(ids).logits, theirs(ids).logits) < 1e-5
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    wanted = ids[:1]
    for _ in range(12):
        with torch.no_grad():
            wanted = torch.cat([wanted, theirs(wanted, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(ours.generate(ids[:1], **how), wanted)
    assert len(set(wanted[0, -12:].tolist())) > 1

    ours.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "ours")(ids).logits, ours(ids).logits)

    export(ours, model_type, tmp_path / "back")
    again = type(theirs).from_pretrained(tmp_path / "back")
    before = type(theirs).from_pretrained(tmp_path / "theirs").state_dict()
    after = again.state_dict()
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert torch.equal(weight, before[name]), name
    with torch.no_grad():
        assert distance(again.eval()(ids).logits, theirs(ids).logits) < 1e-5


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_of_published_models(name):
    """Of their own class without memory, as it would save them."""
    source = family(PUBLISHED[name]["model_type"])
    complete = source.config_of(PUBLISHED[name])
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(complete)
        ours = linattn.LanguageModel(config_of(PUBLISHED[name]))
    wanted = {n: tuple(t.shape) for n, t in revert_weight_conversion(theirs, theirs.state_dict()).items()}
    wanted = {n if source.model_type != "kimi_linear" else _published(n): shape for n, shape in wanted.items()}
    if ours.config.tie_embeddings:
        del wanted[source.tied[1]]
    own, known = ours.state_dict(), set()
    for line in source.lines(ours.config):
        known |= set(line.ours)
        shapes = [tuple(t.shape) for t in line.write([own[n] for n in line.ours])]
        assert shapes == [wanted.pop(n) for n in line.theirs]
    assert not wanted
    assert known == own.keys() - ({"lm_head.weight"} if ours.config.tie_embeddings else set())


def _published(name):
    """transformers renames dense layers too when it saves; published files call them mlp."""
    dense = any(f"block_sparse_moe.{part}_proj" in name for part in ("gate", "up", "down"))
    return name.replace("block_sparse_moe", "mlp") if dense else name


@pytest.fixture
def folder(tmp_path):
    theirs_of("mamba", num_hidden_layers=1).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


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
    with pytest.raises(ValueError, match="is damaged, cut short or no safetensors file"):
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
        with pytest.raises(ValueError, match="is no safetensors file, and nothing else is read"):
            load(folder)
        (folder / "model.safetensors.index.json").unlink()
        (folder / name).unlink()


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", "a\\b.safetensors"])
def test_names_out_of_the_folder(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"backbone.norm_f.weight": name}}))
    with pytest.raises(ValueError, match="which is not in it"):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
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
    with pytest.raises(ValueError, match="lacks weights that model.safetensors.index.json says it has: lm_head.weight"):
        load(tmp_path / "theirs")


def test_configs_that_cannot_be_said(folder):
    for values, message in (
        ({"model_type": "llama"}, "no family of models is called 'llama'; there are"),
        ({"model_type": None}, "has no model_type"),
        ({"use_bias": True}, "mamba: use_bias must be False to be read, but is True"),
        ({"intermediate_size": 50}, "intermediate_size 50 must be a multiple of hidden_size"),
        ({"num_hidden_layers": 10**12}, "says num_hidden_layers = 1000000000000, but there are 12 weights"),
        ({"vocab_size": 10**18}, "config.json asks for tensors that there cannot be"),
        ({"quantization_config": {}}, "quantised"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"state_size": None}, "state_size"),
    ):
        before = (folder / "config.json").read_text()
        configure(folder, **values)
        with pytest.raises(ValueError, match=message):
            load(folder)
        (folder / "config.json").write_text(before)
    change(folder, **{"backbone.norm_f.weight": torch.ones(32, dtype=torch.int8)})
    with pytest.raises(ValueError, match="backbone.norm_f.weight is kept as I8"):
        load(folder)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(folder / "no")
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


def test_a_config_alone_gives_a_new_model():
    config = transformers.Mamba2Config(hidden_size=32, num_heads=4, head_dim=16, num_hidden_layers=1, vocab_size=60, n_groups=2)
    for given in (config, config.to_dict(), linattn.models.LMConfig(vocab_size=60, dim=32, layers=1, mixer="mamba2")):
        model = linattn.load(given)
        assert not model.training
        assert model(torch.zeros(1, 3, dtype=torch.int64)).logits.shape == (1, 3, 60)


@pytest.mark.parametrize(
    ("config", "to", "reason"),
    [
        ({"mixer": "gla"}, "mamba", "it has no mamba layers, only gla"),
        ({"mixer": "mamba, gla", "ffn": "none"}, "mamba", "model.layers.1.mixer is GLA, but would be Mamba"),
        ({"mixer": "mamba"}, "mamba", "model.layers.0.ffn is SwiGLU, but would be nothing"),
        ({"mixer": "mamba", "ffn": "none", "norm": "layer"}, "mamba", "model.layers.0.mixer_norm is LayerNorm, but would be RMSNorm"),
        ({"mixer": "mamba", "ffn": "none", "logit_soft_cap": 3.0}, "mamba", "lm_head.soft_cap is 3.0, but would be None"),
        ({"mixer": "mamba2", "ffn": "none", "mixer_options": {"mamba2": {"pattern": "mqa"}}}, "mamba2", "widths is"),
        ({"mixer": "rwkv4, rwkv_channel", "ffn": "none", "norm": "layer"}, "rwkv", "model.embedding_norm is"),
        ({"mixer": "mamba", "ffn": "none"}, "mambo", "no family of models is called 'mambo'"),
        ({"mixer": "gla"}, "qwen3_next", "gla"),
        ({"mixer": "gla"}, "recurrent_gemma", "it has no geglu feed-forwards, only swiglu"),
        ({"mixer": "gla", "ffn": "geglu"}, "recurrent_gemma", "recurrent_gemma cannot express this model"),
        ({"mixer": "gla"}, "minimax", "it has no experts feed-forwards, only swiglu"),
        ({"mixer": "gla", "ffn": "experts"}, "minimax", "gla"),
        ({"mixer": "gla"}, "kimi_linear", "gla"),
        (
            {"mixer": "lightning", "ffn": "experts", "block": "normed", "mixer_options": {"lightning": {"layer": 0, "layers": 1}}},
            "minimax",
            "model.layers.1.mixer.strength is",
        ),
        ({"mixer": "retnet"}, "retnet", "interleaved is True, but would be False"),
        ({"mixer": "rwkv7, rwkv_channel", "ffn": "none", "norm": "layer", "embedding_norm": True}, "rwkv7", "gated is True"),
    ],
)
def test_what_a_target_cannot_express(config, to, reason, tmp_path):
    model = linattn.LanguageModel(linattn.LMConfig(vocab_size=20, dim=64, layers=2, **config))
    with pytest.raises(ValueError, match=f"^{to} cannot express this model: |^no family") as error:
        export(model, to, tmp_path / "out")
    assert reason in str(error.value)
    assert not list(tmp_path.iterdir())


def test_exports_are_whole_or_not_there(folder, monkeypatch):
    model = load(folder)
    with pytest.raises(TypeError, match="model must be a linattn.LanguageModel or a LinattnForCausalLM, but came as Backbone"):
        export(model.model, "mamba", folder.parent / "out")
    with pytest.raises(FileExistsError, match="is there already"):
        export(model, "mamba", folder)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        export(model, "mamba", folder.parent / "a/b")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("linattn.hf.folder.synced", fail)
    with pytest.raises(OSError, match="disk full"):
        export(model, "mamba", folder.parent / "out")
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_the_command(tmp_path, capsys):
    ours = linattn.hf.LinattnForCausalLM(linattn.hf.LMConfig(vocab_size=50, dim=32, layers=2, mixer="mamba", ffn="none")).eval()
    ours.save_pretrained(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--to", "mamba", str(tmp_path / "out")]) == 0
    assert "MambaForCausalLM" in capsys.readouterr().out
    ids = torch.randint(50, (1, 20))
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert type(theirs).__name__ == "MambaForCausalLM"
        assert distance(theirs(ids).logits, ours(ids).logits) < 1e-5
    (tmp_path / "training").mkdir()  # a run has its newest whole checkpoint inside
    (tmp_path / "training/run.json").write_text("{}")
    ours.save_pretrained(tmp_path / "training/checkpoint-3")
    checkpoint.mark(tmp_path / "training/checkpoint-3")
    assert main(["export", str(tmp_path / "training"), "--to", "mamba", str(tmp_path / "too")]) == 0
    assert "checkpoint-3" in capsys.readouterr().out
    for name, t in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "too/model.safetensors")[name], t)
    assert main(["export", str(tmp_path / "run"), "--to", "rwkv", str(tmp_path / "no")]) == 2
    assert "rwkv cannot express this model" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--to", "mamba", str(tmp_path / "no")]) == 2


@pytest.mark.parametrize(
    ("to", "config"),
    [
        ("mamba", {"mixer": "mamba", "ffn": "none"}),
        ("mamba2", {"mixer": "mamba2", "ffn": "none"}),
        ("rwkv", {"mixer": "rwkv4, rwkv_channel", "ffn": "none", "norm": "layer", "embedding_norm": True}),
        ("gla", {"mixer": "gla"}),
        ("delta_net", {"mixer": "deltanet"}),
        ("hgrn2", {"mixer": "hgrn2"}),
        ("xlstm", {"mixer": "mlstm", "logit_soft_cap": 30.0, "norm_eps": 1e-6, "tie_embeddings": True}),
    ],
)
def test_our_own_models_go_out_and_come_back(to, config, tmp_path):
    torch.manual_seed(0)
    ours, ids = linattn.LanguageModel(linattn.models.LMConfig(vocab_size=50, dim=64, layers=4, **config)).eval(), torch.randint(50, (1, 20))
    export(ours, to, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "out")(ids).logits, ours(ids))
        if to in transformers.CONFIG_MAPPING:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
            torch.testing.assert_close(theirs(ids, use_cache=False).logits, ours(ids), rtol=1e-4, atol=1e-5)
