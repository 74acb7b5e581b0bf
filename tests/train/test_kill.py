"""kill -9 at any moment and going on gives, bit for bit, the weights of an uninterrupted run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from linattn.train import checkpoint
from tests.train.runs import TEXT


def metrics(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def test_killed_again_and_again(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    command = [sys.executable, "-m", "tests.train.lives", str(tmp_path), str(tmp_path / "text.txt")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lives = json.loads(done.stdout)
    assert lives["points"] > 4
    assert lives["moments"] > 1
    whole = tmp_path / "whole"
    for name in ("points", "moments"):
        run = tmp_path / name
        for folder in sorted(whole.glob("checkpoint-*")):
            assert checkpoint.marked(run / folder.name) is not None
            for file in folder.glob("*.safetensors"):
                assert (run / folder.name / file.name).read_bytes() == file.read_bytes(), (name, folder.name, file.name)
        assert metrics(run) == metrics(whole)
        assert not list(run.glob(".*.part"))


@pytest.mark.slow
def test_two_processes_go_on_exactly(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "linattn", "train"]

    def run(out: str, *words: str) -> None:
        done = subprocess.run([*torchrun, "--out", str(tmp_path / out), *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    small = ["--mixer", "gla", "--steps", "4", "--dim", "32", "--layers", "1", "--context", "16", "--batch-size", "2", "--save-every", "2"]
    run("whole", "--text", str(tmp_path / "text.txt"), *small)
    subprocess.run(["cp", "-r", str(tmp_path / "whole"), str(tmp_path / "cut")], check=True)
    (tmp_path / "cut" / "checkpoint-4" / checkpoint.MARK).unlink()
    run("cut", "--resume")
    files = sorted(f.name for f in (tmp_path / "whole" / "checkpoint-4").glob("*.safetensors"))
    assert "generators-1.safetensors" in files
    for name in files:
        assert (tmp_path / "whole" / "checkpoint-4" / name).read_bytes() == (tmp_path / "cut" / "checkpoint-4" / name).read_bytes()
