"""Sizes beyond memory are refused in one line, before allocation."""

import time

import pytest
import torch

from linattn import LMConfig
from linattn.cli.main import main
from linattn.models import LanguageModel, memory

HUGE = str(10**12)


@pytest.mark.parametrize(
    "fields",
    [
        {"mixer": "gla*3, softmax", "layers": 9},
        {"mixer": "gla, softmax", "ffn": "swiglu, none, mlp", "layers": 7, "tie_embeddings": True},
        {"mixer": "mamba2", "layers": 1, "norm": "layer"},
        {"mixer": "gla", "layers": 3, "layer_options": [{"heads": 2}, {"heads": 4}, {"heads": 2}]},
        {"mixer": "gla", "ffn": "switch", "ffn_options": {"switch": {"count": 4}}, "layers": 5},
    ],
)
def test_the_estimate_is_the_number_of_parameters(fields):
    """Except for norms beside the stack."""
    config = LMConfig(vocab_size=100, dim=64, **fields)
    with torch.device("meta"):
        model = LanguageModel(config)
    wanted = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in model.model.norm.parameters())
    assert memory.language_parameters(config) == wanted


def test_a_trillion_layers_are_counted_at_once():
    begun = time.perf_counter()
    assert memory.language_parameters(LMConfig(layers=10**12)) > 10**17
    assert time.perf_counter() - begun < 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--layers", HUGE], "layers 1,000,000,000,000) and batches of 32 tokens need at least"),
        (["train", "--dim", str(10**6)], "dim 1,000,000,"),
        (["train", "--dim", str(32 * 10**11)], "need more memory than there is"),
        (["train", "--batch-size", HUGE], "batches of 16,000,000,000,000 tokens need at least"),
        (["train", "--context", HUGE], "the text is too short for a context of"),
        (["train", "--mixer", f"gla*{HUGE}"], "mixer may name at most 1,000,000 layers"),
        (["compare", "--layers", HUGE], "layers 1,000,000,000,000) and batches of"),
        (["compare", "--dim", str(10**6)], "dim 1,000,000,"),
        (["compare", "--task", "reverse", "--layers", HUGE], "layers 1,000,000,000,000) need at least"),
        (["compare", "--task", "reverse", "--mixers", "all", "--layers", HUGE], "layers 1,000,000,000,000) need at least"),
    ],
)
def test_the_command_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    if "--task" not in words:
        words = [*words, "--text", "fox.txt"]
    if words[0] == "train":
        words = [words[0], "--context", "16", "--batch-size", "2", *words[1:]]
    assert main([*words, "--out", "run"]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1, err
    assert not (tmp_path / "run").exists()


def test_a_model_of_more_layers_than_weights(tmp_path, capsys):
    """As in a damaged config.json: nothing is built."""
    from dataclasses import asdict

    from linattn.models.files import save

    config = LMConfig(vocab_size=256, dim=32, layers=1)
    told = {name: value for name, value in asdict(config).items() if name in LMConfig.__dataclass_fields__}
    save(tmp_path, LanguageModel(config), {**told, "layers": 10**12, "model_type": "linattn"})
    assert main(["generate", str(tmp_path), "--prompt", "a"]) == 2
    assert "does not fit its config: it has" in capsys.readouterr().err


def test_what_there_is(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 10**9)
    memory.require(10**9, "they")
    with pytest.raises(ValueError, match=r"^they need at least 2\.5 TB of memory, but there are 1\.0 GB$"):
        memory.require(2_500_000_000_000, "they")
    monkeypatch.setattr(memory, "available", lambda: None)
    memory.require(10**30, "they")


def test_this_machine_tells():
    assert memory.available() is None or memory.available() > 10**8
