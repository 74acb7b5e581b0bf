"""The benchmark of mixers of images: its figures, and that each mixer is measured in both modes."""

import json

import pytest
import torch

from linattn.bench import vision
from linattn.cli.main import main


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(vision, "SETTINGS", {"cpu": (32, 64, torch.float32, 0.0)})
    monkeypatch.setattr(vision, "SIDES", (2, 4, 9))


def test_rows(tiny, tmp_path, capsys):
    out = tmp_path / "rows.json"
    assert main(["bench", "vision", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {(r["mixer"], r["side"], r["mode"]) for r in rows} == {(n, s, m) for n in vision.MIXERS for s in (2, 4) for m in vision.MODES}
    for r in rows:
        assert r["batch"] == 64 // r["side"] ** 2 and r["tokens_per_second"] == pytest.approx(64e3 / r["ms"])
    table = capsys.readouterr().out
    assert all(table.count(f" {name} ") == 2 for name in vision.MIXERS) and "2x2" in table and "9x9" not in table


def test_one_image_may_have_more_tokens_than_a_batch(tiny):
    row = vision.measure("slab", 9, "forward+backward", "cpu", quick=True)
    assert row["batch"] == 1 and row["tokens_per_second"] == pytest.approx(81e3 / row["ms"])


def test_refusals(capsys):
    for words, message in (
        (["--models", "gla"], "--models must be among softmax, focused"),
        (["--shapes", "B1T8H1D8"], "--shapes cannot be used with vision"),
        (["--peers", "fla"], "--peers cannot be used with vision"),
    ):
        assert main(["bench", "vision", "--device", "cpu", *words]) != 0
        assert message in capsys.readouterr().err
