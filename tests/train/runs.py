"""Tiny runs for the tests of the trainer."""

import json
from pathlib import Path

from linattn.train import TrainOptions

TEXT = "the quick brown fox jumps over the lazy dog. " * 80


def options(out: Path, text: Path, **changed) -> TrainOptions:
    small = {"mixer": "gla, softmax", "steps": 6, "dim": 32, "layers": 2, "context": 16, "batch_size": 2, "save_every": 2, "eval_every": 3}
    return TrainOptions(out=out, text=(str(text),), **{**small, **changed})


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of the files that must not depend on interruptions."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name.endswith(".safetensors")}


def rates(folder: Path) -> list[float]:
    """The learning rate of each step that was logged."""
    return [line["learning_rate"] for line in json.loads((folder / "trainer_state.json").read_text())["log_history"] if "loss" in line]


def edited(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
