"""Models in GGUF files against llama.cpp itself, and the files against the ``gguf`` package's reader."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from linattn.models import LanguageModel, LMConfig

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: pip install gguf")
pytest.importorskip("transformers")

from linattn.hf.gguf.write import export_gguf  # noqa: E402

needs_llama = pytest.mark.skipif(
    "LIBLLAMA" not in os.environ and (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="llama.cpp comes as a wheel for Linux on x86-64; LIBLLAMA= the path of a libllama.so",
)
_RWKV = {"layers": 6, "ffn": "none", "norm": "layer", "embedding_norm": True}
_DELTA = {"heads": 2, "value_heads": 4, "key_size": 32, "value_size": 32, "eps": 1e-6}
_SOFTMAX = {"heads": 4, "kv_heads": 2, "head_dim": 32, "rotated": 16, "norm_eps": 1e-6, "gated": True}
MODELS = {
    "qwen3next": {
        "mixer": "gated_deltanet*3, softmax",
        "layers": 4,
        "norm": "zero_centered_rms",
        "norm_eps": 1e-6,
        "ffn": "experts",
        "mixer_options": {"gated_deltanet": _DELTA, "softmax": _SOFTMAX},
        "ffn_options": {"experts": {"hidden": 32, "count": 4, "active": 2, "renormalize": True, "shared": 32, "shared_gate": True}},
    },
    "kimi-linear": {
        "mixer": "kda*2, mla",
        "layers": 6,
        "ffn": "swiglu, experts, experts, experts, experts, experts",
        "mixer_options": {
            "kda": {"heads": 4, "size": 32, "eps": 1e-5},
            "mla": {"heads": 4, "rank": 32, "head_dim": 16, "shared": 8, "value_dim": 24},
        },
        "ffn_options": {
            "swiglu": {"hidden": 96},
            "experts": {"hidden": 32, "count": 4, "active": 2, "scores": "sigmoid", "renormalize": True, "scale": 2.5, "shared": 64},
        },
    },
    "minimax-01": {
        "mixer": "lightning*3, softmax",
        "layers": 4,
        "norm_eps": 1e-6,
        "block": "normed",
        "residual_scales": {"lightning": [1.5, 1.0], "softmax": [1.5, 1.0], "experts": [1.5, 1.0]},
        "layer_options": [{"layer": 0, "layers": 4}, {"layer": 1, "layers": 4}, {"layer": 2, "layers": 4}, {}],
        "mixer_options": {"lightning": {"heads": 2, "head_dim": 32}, "softmax": {"heads": 2, "kv_heads": 1, "head_dim": 32}},
        "ffn": "experts",
        "ffn_options": {"experts": {"hidden": 32, "count": 4, "active": 2}},
    },
    "mamba": {"mixer": "mamba", "layers": 2, "ffn": "none"},
    "mamba2": {"mixer": "mamba2", "layers": 2, "ffn": "none", "mixer_options": {"mamba2": {"head_dim": 32, "groups": 2, "state_size": 32}}},
    "rwkv6": {"mixer": "rwkv6, rwkv_channel", **_RWKV, "mixer_options": {"rwkv_channel": {"hidden": 224}}},
    "rwkv7": {"mixer": "rwkv7, rwkv_channel", **_RWKV, "mixer_options": {"rwkv_channel": {"hidden": 256, "gated": False}}},
}


def model(name: str, **options) -> LanguageModel:
    """Small model of a family with all weights random, so that none is zero."""
    torch.manual_seed(0)
    lm = LanguageModel(LMConfig(**{"vocab_size": 96, "dim": 64, **MODELS[name], **options})).eval()
    with torch.no_grad():
        for p in lm.parameters():
            if p.ndim >= 2:
                p.add_(torch.randn_like(p) * 0.3 * p.shape[-1] ** -0.5)
            else:
                p.add_(0.05 * torch.randn_like(p))
    return lm


def theirs(path: Path, tokens: list[int], text: str = "") -> dict:
    command = [sys.executable, "-m", "tests.hf.llama_cpp", path, json.dumps(tokens), text]
    how = {"cwd": Path(__file__).parents[2], "env": {**os.environ, "OMP_NUM_THREADS": "1"}, "timeout": 120}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", **how)
    if done.returncode and "LINATTN_OFFLINE=1" in done.stderr:
        pytest.skip("the wheel with llama.cpp is not there, and LINATTN_OFFLINE=1")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def greedy(lm, prompt: list[int], count: int) -> list[int]:
    from linattn.generate import stream

    return list(stream(lm, prompt, max_new_tokens=count, temperature=0.0))


@needs_llama
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_llama_cpp(name, tied, tmp_path):
    lm = model(name, tie_embeddings=tied)
    assert export_gguf(lm, tmp_path / "a.gguf") == name
    prompt = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
    text = [*prompt, *greedy(lm, prompt, 24)]
    found = torch.tensor(theirs(tmp_path / "a.gguf", text)["logits"])
    with torch.no_grad():
        wanted = lm(torch.tensor([text]))[0]
    assert (found - wanted).abs().max() <= 1e-4
    assert found.argmax(-1)[len(prompt) - 1 : -1].tolist() == text[len(prompt) :]


@needs_llama
@pytest.mark.parametrize(("dtype", "limit"), [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 5e-2)])
def test_fewer_bits_come_near(dtype, limit, tmp_path):
    """A rounding of 2^-11, 2^-8 and of 1 in 254 of the largest of 32 weights, through two layers."""
    lm, ids = model("mamba2"), list(range(20))
    export_gguf(lm, tmp_path / "a.gguf", dtype=dtype)
    with torch.no_grad():
        wanted = lm(torch.tensor([ids]))[0]
    found = torch.tensor(theirs(tmp_path / "a.gguf", ids)["logits"])
    assert (found - wanted).norm() <= limit * wanted.norm()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_files_hold_what_their_metadata_says(name, dtype, tmp_path):
    lm = model(name)
    export_gguf(lm, tmp_path / "a.gguf", dtype=dtype)
    file = gguf.GGUFReader(tmp_path / "a.gguf")
    fields = {key: field.contents() for key, field in file.fields.items()}
    assert fields["general.architecture"] == name and fields[f"{name}.embedding_length"] == 64 and fields[f"{name}.vocab_size"] == 96
    tensors = {t.name: t for t in file.tensors}
    architecture = next((number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name), None)  # 0.19 lacks MiniMax-01
    parts = gguf.MODEL_TENSORS.get(architecture, gguf.TENSOR_NAMES)
    known = {gguf.TENSOR_NAMES[t].format(bid=i) for t in parts for i in range(6)}
    assert all(t.removesuffix(".weight").removesuffix(".bias") in known for t in tensors)
    kinds = {t.tensor_type.name for t in tensors.values()}
    assert kinds == {"F32", dtype}
    kept = tensors["token_embd.weight"]
    embedding = torch.from_numpy(gguf.quants.dequantize(kept.data, kept.tensor_type).copy())
    limit = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 127}[dtype]  # of the largest
    weight = lm.model.embedding.weight.detach()
    assert (embedding - weight).abs().max() <= limit * weight.abs().max()


def _tokenizer(folder: Path, *, digits: bool = False, size: int = 300) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level]) if digits else level
    text = ["the cat sat on the mat, and then the other cat sat there: 1234 times"] * 3
    made.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    ))  # fmt: skip
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder


@needs_llama
@pytest.mark.parametrize("digits", [False, True])
def test_llama_cpp_cuts_a_text_into_the_same_tokens(digits, tmp_path):
    from tokenizers import Tokenizer

    folder = _tokenizer(tmp_path / "t", digits=digits)
    export_gguf(model("mamba", vocab_size=320), tmp_path / "a.gguf", tokenizer=folder)
    text = "then the cat's 4096 mats,\n\n  über naïve 猫 🐈 sat<end>the"
    wanted = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert theirs(tmp_path / "a.gguf", [1], text)["tokens"] == wanted


@needs_llama
def test_the_command_takes_the_tokenizer_along(tmp_path, capsys):
    from linattn.cli.main import main
    from linattn.data import ByteCodec
    from linattn.hf import LinattnForCausalLM
    from linattn.hf import LMConfig as Config
    from linattn.hf.tokenizer import tokenizer_of

    lm = LinattnForCausalLM(Config(vocab_size=256, dim=64, **MODELS["mamba"])).eval()
    lm.save_pretrained(tmp_path / "run")
    tokenizer_of(ByteCodec()).save_pretrained(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "a.gguf"), "--to", "gguf", "--dtype", "BF16"]) == 0
    assert "mamba, " in capsys.readouterr().out
    text = "né 猫"
    assert theirs(tmp_path / "a.gguf", [1], text)["tokens"] == list(text.encode())
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "no"), "--to", "mamba", "--dtype", "BF16"]) == 2
    assert "--dtype can only be used with --to gguf" in capsys.readouterr().err


def test_errors_say_what_is_written(tmp_path):
    plain = {"vocab_size": 96, "dim": 64, "layers": 2}
    with pytest.raises(ValueError, match="no model with layers of gla that can be written; for --to gguf train with --mixer one of"):
        export_gguf(LanguageModel(LMConfig(**plain, mixer="gla")), tmp_path / "a.gguf")
    with pytest.raises(ValueError, match="cannot express this model"):
        export_gguf(LanguageModel(LMConfig(**plain, mixer="mamba", ffn="swiglu")), tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"expand = 2, but the model has 1\.0"):
        export_gguf(model("mamba", mixer_options={"mamba": {"expand": 1}}), tmp_path / "a.gguf")
    with pytest.raises(ValueError, match="dtype must be one of F32, F16, BF16, Q8_0, Q4_0"):
        export_gguf(model("mamba"), tmp_path / "a.gguf", dtype="Q5_0")
    with pytest.raises(TypeError, match=r"linattn\.LanguageModel"):
        export_gguf(torch.nn.Linear(2, 2), tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"has a token 2\d\d, but the model has 96"):
        export_gguf(model("mamba"), tmp_path / "a.gguf", tokenizer=_tokenizer(tmp_path / "t"))
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        (tmp_path / "empty").mkdir()
        export_gguf(model("mamba"), tmp_path / "a.gguf", tokenizer=tmp_path / "empty")
    told = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    for change, words in (
        ({"pre_tokenizer": {"type": "Metaspace"}}, "cut by Metaspace"),
        ({"model": {"type": "Unigram"}}, "byte-level BPE"),
    ):
        (tmp_path / "t" / "tokenizer.json").write_text(json.dumps(told | change))
        with pytest.raises(ValueError, match=words):
            export_gguf(model("mamba", vocab_size=320), tmp_path / "a.gguf", tokenizer=tmp_path / "t")
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_read_back(name, tied, tmp_path):
    from linattn import load

    lm = model(name, tie_embeddings=tied)
    export_gguf(lm, tmp_path / "a.gguf")
    again, ids = load(tmp_path / "a.gguf"), torch.arange(40)[None]
    own, there = lm.state_dict(), again.state_dict()
    assert own.keys() == there.keys()
    near = ("A_log", ".time_mix_", *(("norm.weight",) if name == "qwen3next" else ()))  # stored as -exp(A_log), 1 - x and 1 + x
    for n, t in own.items():
        assert torch.allclose(t, there[n], rtol=3e-7, atol=2e-7) if any(part in n for part in near) else torch.equal(t, there[n]), n
    with torch.no_grad():
        assert (again(ids).logits - lm(ids)).abs().max() <= 1e-5


def test_a_byte_vocabulary_is_read_back(tmp_path):
    from linattn.hf import LinattnForCausalLM
    from linattn.hf import LMConfig as Config
    from linattn.train.run import load_run

    LinattnForCausalLM(Config(vocab_size=256, dim=64, layers=2, mixer="mamba", ffn="none")).save_pretrained(tmp_path / "m")
    from linattn.cli.main import main
    from linattn.data import ByteCodec
    from linattn.hf.tokenizer import tokenizer_of

    tokenizer_of(ByteCodec()).save_pretrained(tmp_path / "m")
    assert main(["export", str(tmp_path / "m"), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 0
    _, codec = load_run(tmp_path / "a.gguf")
    text = "Größe 猫 <end> 12"
    assert codec.decode(codec.encode(text)) == text


def test_a_file_whose_metadata_do_not_fit_its_tensors_is_refused(tmp_path, monkeypatch):
    from linattn import load
    from linattn.hf.gguf import write

    written = write.FAMILIES["rwkv7"]
    for key, words in (("attention.gate_lora_rank", "Of another shape: blk.0.time_mix_g1.weight"), ("block_count", "Missing: blk.3.")):
        wrong = replace(written, metadata=lambda ours, key=key: (found := written.metadata(ours)) | {key: found[key] + 1})
        monkeypatch.setitem(write.FAMILIES, "rwkv7", wrong)
        export_gguf(model("rwkv7"), tmp_path / "a.gguf")
        with pytest.raises(ValueError, match=rf"a\.gguf: the tensors do not fit the metadata\. {words}"):
            load(tmp_path / "a.gguf")


@pytest.mark.parametrize(("to", "end"), [("guff", "; did you mean 'gguf'?"), ("onnx", "gemma3_text, gguf, gla")])
def test_an_unknown_type_is_refused_with_gguf_among_the_choices(to, end, tmp_path, capsys):
    from linattn.cli.main import main

    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--to", to]) == 2
    error = capsys.readouterr().err
    assert f"--to must be a family of models or gguf, but came as '{to}'" in error and end in error
