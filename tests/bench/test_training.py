"""The benchmark of training on a CPU: compared rows, and that the portable form is really measured."""

import json

import pytest
import torch

from linattn.bench import training
from linattn.cli.main import main
from linattn.ops import dispatch


def test_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, "TINY", training.Size(dim=64, layers=1, ffn_dim=16, batch=1, tokens=4, rounds=1))
    out = tmp_path / "rows.json"
    assert main(["bench", "train", "--quick", "--device", "cpu", "--models", "gla", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    pairs = [pair for pair in training.MODELS if pair[1] in ("gla", "llama")]  # Llama is always included
    assert [(r["library"], r["model"], r["dtype"]) for r in rows] == [(*p, d) for d in ("float32", "bfloat16") for p in pairs]
    for r in rows:
        assert r["tokens_per_second"] == pytest.approx(4e3 / r["step_ms"])
        assert (r["times_llama"] == 1) == (r["model"] == "llama")
    assert "Llama" in capsys.readouterr().out


@pytest.mark.parametrize(("library", "name"), training.MODELS)
def test_models_are_of_one_size(library, name):
    with torch.device("meta"):
        parameters = sum(p.numel() for p in training.build(library, name, training.Size()).parameters())
    assert parameters == pytest.approx(7e6, rel=0.02)


def test_portable_means_without_the_kernels(monkeypatch):
    asked = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *call: asked.append(choose(*call)) or asked[-1])
    size = training.Size(dim=64, layers=1, ffn_dim=64, batch=1, tokens=8)
    before = dispatch.BACKENDS
    for library in training.OURS:
        training.step_of(library, "gla", torch.float32, size)[0]()
    assert asked[-1] == "torch" and before == dispatch.BACKENDS


def test_refusals(capsys):
    for words, message in (
        (["--models", "gpt"], "--models must be among gla, gated_deltanet"),
        (["--peers", "fla"], "--peers cannot be used with train on cpu"),
    ):
        assert main(["bench", "train", "--device", "cpu", *words]) != 0
        assert message in capsys.readouterr().err
