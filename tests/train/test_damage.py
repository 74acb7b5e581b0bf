"""Damaged files of a run are named and left unchanged."""

import json
import os
import shutil
from pathlib import Path

import pytest

from linattn.cli.main import main
from linattn.train import checkpoint, load_run
from tests.train.runs import edited


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("weights", "is damaged"),
        ("shapes", "does not fit its config: lm_head.weight has|does not fit its config: "),
        ("config", "no family of models is called 'bloom'|has no tokenizer.json"),
        ("no mark", "holds no complete checkpoint"),
        ("gone", "does not exist"),
    ],
)
def test_damaged_runs(damage, message, done, tmp_path):
    run = tmp_path / "run"
    if damage != "gone":
        shutil.copytree(done.run, run)
    folder = run / "checkpoint-6"
    if damage == "weights":
        os.truncate(folder / "model.safetensors", 1000)
    elif damage == "config":
        (folder / "config.json").write_text('{"model_type": "bloom"}')
        (folder / checkpoint.MARK).unlink()
    elif damage == "shapes":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "dim": 10_000_000}))  # would take 100 TB if built first
        (folder / checkpoint.MARK).unlink()
    elif damage == "no mark":
        folder = run
        for mark in run.glob("*/complete.json"):
            mark.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_run(folder)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("run.json", lambda path: os.truncate(path, 50)),
        ("run.json", lambda path: path.write_text("[]")),
        ("run.json", lambda path: edited(path, lambda run: run.pop("same"))),
        ("run.json", lambda path: edited(path, lambda run: run.pop("options"))),
        ("run.json", lambda path: edited(path, lambda run: run.update(same=3))),
        ("run.json", lambda path: edited(path, lambda run: run["options"].pop("text"))),
        ("run.json", lambda path: edited(path, lambda run: run["options"].update(of_tomorrow=1))),
        ("run.json", lambda path: edited(path, lambda run: run["options"].update(steps="six"))),
        ("metrics.jsonl", lambda path: path.write_text('{"step": 3}\n' + path.read_text())),
        ("metrics.jsonl", lambda path: path.write_text("{\n" + path.read_text())),
    ],
)
def test_a_damaged_run_is_named_and_stays(name, damage, done, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(done.run, run)
    damage(run / name)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["train", "--resume", "--out", str(run)]) == 2
    err = capsys.readouterr().err
    assert str(run / name) in err and err.count("\n") == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("change", [{"dim": "wide"}, {"layers": None}, {"mixer": 3}, {"mixer_options": []}])
def test_a_damaged_config_is_named(change, done, tmp_path, capsys):
    path = shutil.copytree(done.run, tmp_path / "run") / "checkpoint-6" / "config.json"
    edited(path, lambda config: config.update(change))
    assert main(["generate", str(tmp_path / "run" / "checkpoint-6"), "--prompt", "a"]) == 2
    err = capsys.readouterr().err
    assert str(path) in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "change", [lambda about: about.pop("losses"), lambda about: about.update(step=5), lambda about: about.pop("checksum")]
)
def test_a_damaged_mark_is_named(change, done, tmp_path):
    run = shutil.copytree(done.run, tmp_path / "run")
    edited(run / "checkpoint-6" / "complete.json", change)
    with pytest.raises(ValueError, match="checkpoint-6/complete.json is damaged"):
        checkpoint.newest(run)


def test_a_mark_of_an_earlier_version(done, tmp_path):
    run = shutil.copytree(done.run, tmp_path / "run")
    edited(run / "checkpoint-6" / "complete.json", lambda about: [about.pop(name) for name in ("sha256", "checksum")])
    load_run(run)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model", "optimizer", "schedule", "generators-0", "config", "complete"])
def test_one_flipped_bit_in_a_checkpoint(name, done, text, tmp_path, capsys):
    """First, middle and last byte: in the header and in the payload; generate and train --resume refuse it alike."""
    path = next((shutil.copytree(done.run, tmp_path / "run") / "checkpoint-6").glob(f"{name}.*"))
    whole = path.read_bytes()
    for bit in (0, 8 * 60 + 3, 4 * len(whole) + 5, 8 * len(whole) - 7):
        flip(path, bit)
        for command in (["generate", str(path.parent), "--prompt", "a"], ["train", "--resume", "--out", str(tmp_path / "run")]):
            assert main(command) == 2
            err = capsys.readouterr().err
            assert f"{path} is damaged" in err and err.count("\n") == 1
        path.write_bytes(whole)
    assert main(["generate", str(path.parent), "--prompt", "a", "--max-new-tokens", "1"]) == 0
