"""Causality check of a model's loss: figures that agree for causal models, and detect models that read the next token."""

import json

import pytest
import torch

from benchmarks import causality
from linattn.data import prepare
from linattn.mixers import base
from linattn.train import TrainOptions, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokens of bytes, and a run of two steps."""
    folder = tmp_path_factory.mktemp("causality")
    generator = torch.Generator().manual_seed(0)
    text = "".join(chr(97 + n) for n in torch.randint(26, (6000,), generator=generator).tolist())
    lines = [json.dumps({"text": text[i : i + 600]}) + "\n" for i in range(0, len(text), 600)]
    (folder / "text.jsonl").write_text("".join(lines))
    prepare([folder / "text.jsonl"], folder / "tokens", validation=0.3)
    options = {"dim": 32, "layers": 2, "context": 96, "batch_size": 2, "steps": 2, "eval_tokens": 384, "device": "cpu"}
    train(TrainOptions(mixer="rwkv7", data=folder / "tokens", join_documents=True, out=folder / "run", **options), progress=False)
    return folder


def rows(folder):
    given = ["--windows", "4", "--rows", "4", "--places", "5", "--steps", "40", "--device", "cpu"]
    out = folder / "causality.json"
    out.unlink(missing_ok=True)
    assert causality.main([str(folder / "run"), "--data", str(folder / "tokens"), *given, "--out", str(out)]) == 0
    return {(row["way"], row.get("backend"), row.get("dtype")): row for row in json.loads(out.read_text())["rows"]}


def test_a_causal_model_has_one_loss(folder):
    found = rows(folder)
    exact = found["windows", "torch", "fp32"]["bits_per_byte"]
    assert found["trainer", None, None]["bits_per_byte"] == pytest.approx(exact, rel=1e-5)
    assert found["windows", "auto", "fp32"]["bits_per_byte"] == pytest.approx(exact, rel=1e-5)
    assert found["windows", "auto", "bf16"]["bits_per_byte"] == pytest.approx(exact, rel=1e-2)
    for way in ("prefixes", "steps"):
        row = found[way, "auto", "fp32"]
        assert row["bits_per_byte"] == pytest.approx(row["whole"], rel=1e-5)
    assert found["prefixes", "auto", "fp32"]["changed"] == found["prefixes", "auto", "bf16"]["changed"] == 0


def test_a_model_that_reads_the_next_token_is_found(folder, monkeypatch):
    own = base.linear_attention

    def ahead(q, k, v, **how):
        return own(q, k, torch.cat([v[:, 1:], v[:, -1:]], 1), **how)

    monkeypatch.setattr(base, "linear_attention", ahead)
    found = rows(folder)
    row = found["prefixes", "auto", "fp32"]
    assert row["changed"] > 1e-3
    assert abs(row["bits_per_byte"] - row["whole"]) > 1e-4
    row = found["steps", "auto", "fp32"]
    assert abs(row["bits_per_byte"] - row["whole"]) > 1e-4
