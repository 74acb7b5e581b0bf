"""Export of models in published formats, atomically."""

import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

import linattn
from linattn.cli.main import main
from linattn.data.codec import ByteCodec
from linattn.hf.load import export, load
from linattn.hf.tokenizer import tokenizer_of
from linattn.train import checkpoint
from tests.hf.theirs import distance


@pytest.mark.parametrize(
    ("config", "to", "reason"),
    [
        ({"mixer": "gla"}, "mamba", "it has no mamba layers, only gla"),
        ({"mixer": "mamba, gla", "ffn": "none"}, "mamba", "model.layers.1.mixer is GLA, but would be Mamba"),
        ({"mixer": "mamba"}, "mamba", "model.layers.0.ffn is SwiGLU, but would be nothing"),
        ({"mixer": "mamba", "ffn": "none", "norm": "layer"}, "mamba", "model.layers.0.mixer_norm is LayerNorm, but would be RMSNorm"),
        ({"mixer": "mamba", "ffn": "none", "logit_soft_cap": 3.0}, "mamba", "lm_head.soft_cap is 3.0, but would be None"),
        ({"mixer": "mamba2", "ffn": "none", "mixer_options": {"mamba2": {"pattern": "mqa"}}}, "mamba2", "widths is"),
        ({"layers": 4, "mixer": "rwkv4, rwkv_channel", "ffn": "none", "norm": "layer"}, "rwkv", "model.embedding_norm is"),
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
        ({"layers": 4, "mixer": "rwkv7, rwkv_channel", "ffn": "none", "norm": "layer", "embedding_norm": True}, "rwkv7", "gated is True"),
        ({"mixer": "rwkv4, rwkv_channel", "ffn": "none", "norm": "layer", "embedding_norm": True}, "rwkv", "one block"),
        ({"mixer": "rwkv7, rwkv_channel", "ffn": "none", "norm": "layer", "embedding_norm": True}, "rwkv7", "one block"),
    ],
)
def test_what_a_target_cannot_express(config, to, reason, tmp_path):
    model = linattn.LanguageModel(linattn.LMConfig(**{"vocab_size": 20, "dim": 64, "layers": 2, **config}))
    with pytest.raises(ValueError, match=f"^{to} cannot express this model: |^no family") as error:
        export(model, to, tmp_path / "out")
    assert reason in str(error.value)
    assert not list(tmp_path.iterdir())


def test_exports_are_whole_or_not_there(folder, monkeypatch):
    model = load(folder)
    with pytest.raises(TypeError, match="model must be a linattn.LanguageModel or a LinattnForCausalLM, but came as Decoder"):
        export(model.model, "mamba", folder.parent / "out")
    with pytest.raises(FileExistsError, match="already exists"):
        export(model, "mamba", folder)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        export(model, "mamba", folder.parent / "a/b")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("linattn.hf.folder.sync", fail)
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
    checkpoint.mark(tmp_path / "training/checkpoint-3", step=3, seconds=0.0, losses=[])
    assert main(["export", str(tmp_path / "training"), "--to", "mamba", str(tmp_path / "too")]) == 0
    assert "checkpoint-3" in capsys.readouterr().out
    for name, t in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "too/model.safetensors")[name], t)
    assert main(["export", str(tmp_path / "run"), "--to", "rwkv", str(tmp_path / "no")]) == 2
    assert "rwkv cannot express this model" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--to", "mamba", str(tmp_path / "no")]) == 2


def test_the_tokenizer_goes_along(folder, capsys):
    kept = tokenizer_of(ByteCodec())
    kept.chat_template = "{{ messages[0].content }}"
    kept.save_pretrained(folder)
    (folder / "modeling.py").write_text("")  # nobody's code does
    out = folder.parent / "out"
    assert main(["export", str(folder), "--to", "mamba", str(out)]) == 0
    capsys.readouterr()
    again = transformers.AutoTokenizer.from_pretrained(out)
    assert again.encode("né") == kept.encode("né") == list("né".encode())
    assert again.eos_token_id == 0
    assert again.apply_chat_template([{"role": "user", "content": "so"}], tokenize=False) == "so"
    assert not (out / "modeling.py").exists()

    model = load(folder)
    export(model, "mamba", folder.parent / "bare")
    assert not (folder.parent / "bare/tokenizer.json").exists()
    with pytest.raises(FileNotFoundError, match="tokenizer must be a folder with a tokenizer, but .*nowhere is not one"):
        export(model, "mamba", folder.parent / "no", tokenizer=folder / "nowhere")
    (folder / "merges.txt").symlink_to("/etc/hostname")
    with pytest.raises(ValueError, match=r"merges.txt is a link out of its folder"):
        export(model, "mamba", folder.parent / "no", tokenizer=folder)
    assert not (folder.parent / "no").exists()


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
