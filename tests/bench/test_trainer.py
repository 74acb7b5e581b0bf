"""The trainer beside the benchmark of training steps: the same model, and speeds read from the trainer's own logs."""

import json
from dataclasses import fields

import pytest

from benchmarks import trainer
from linattn.bench.gpu.train import TINY, Size
from linattn.train import TrainOptions


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A tokenizer of two small files."""
    (tmp_path / "library").mkdir()
    for name in "ab":
        (tmp_path / "library" / f"{name}.py").write_text(f"def {name}(x):\n    return x\n" * 50)
    monkeypatch.setattr(trainer.sysconfig, "get_path", lambda name: str(tmp_path / "library"))
    return trainer.tokenizer(tmp_path, 280)


def test_the_model_is_the_benchmarks(file):
    given = [a.removeprefix("--").split("=")[0] for a in trainer.arguments("gated_deltanet", Size(), file, 50)[1:]]
    assert {name.replace("-", "_") for name in given} - {"mixer_option"} <= {f.name for f in fields(TrainOptions)}
    assert "--mixer-option=gated_deltanet.heads=8" in trainer.arguments("gated_deltanet", Size(), file, 50)
    assert len(json.loads(file.read_text())["model"]["vocab"]) <= 280


@pytest.mark.slow
def test_speeds_are_those_of_the_logs(file, tmp_path):
    given = [a for a in trainer.arguments("gla", TINY, file, 20) if a != "--compile"]
    row = trainer.trained([*given, f"--text={tmp_path}/library/*.py", "--device=cpu"], TINY, 20)
    assert row["step_ms"] == pytest.approx(1e3 * TINY.batch * TINY.tokens / row["tokens_per_second"])
    assert [step for step, _ in row["losses"]] == [10, 20] and row["peak_gb"] > 0


def test_a_training_that_ends_early_says_why(file):
    row = trainer.trained(["train", "--steps=0"], TINY, 0)
    assert row["tokens_per_second"] is None and "steps" in row["failure"]
